/* SPDX-License-Identifier: Apache-2.0 */
/* Every refusal and what it says. */
#include "tests/runtime/config/reading.h"

/* What stands in a file beside a batch size, and what is said of it. */
static const char *const refusals[][2] = {
    /* Unknown keys get the nearest known one. */
    {"'train_bach_size': 8", "config.json: train_bach_size: unknown key; did "
                             "you mean train_batch_size?"},
    {"'stage': 3", "did you mean zero_optimization.stage?"},
    {"'zero_optimisation': {'stage': 3}", "did you mean zero_optimization?"},
    {"'zero_optimization': {'offload_optimiser': {}}",
     "did you mean zero_optimization.offload_optimizer?"},
    {"'model': {'layer': 1}", "did you mean model.layers?"},
    {"'': 1", "unknown key"},
    {"'qqqqqqqqqqqqqqqq': 1", "unknown key\n"},
    {"'zero_optimization.stage': 1", "a dot in a key"},
    /* Wrong types say what was found. */
    {"'zero_optimization': {'stage': 'three'}",
     "zero_optimization.stage: expected an integer, found 'three' (a string)"},
    {"'zero_optimization': {'stage': 1.5}",
     "expected an integer, found 1.5 (a number)"},
    {"'zero_optimization': {'stage': 1e300}",
     "expected an integer, found 1e300 (a number)"},
    {"'zero_optimization': {'stage': null}", "expected an integer, found null"},
    {"'zero_optimization': true",
     "zero_optimization: expected an object, found true"},
    {"'bf16': {'enabled': 1}",
     "bf16.enabled: expected true or false, found 1 (an integer)"},
    {"'gradient_clipping': '1'", "expected a number, found '1' (a string)"},
    {"'optimizer': {'params': {'betas': [0.9]}}",
     "expected an array of two numbers, found [0.9] (an array)"},
    {"'optimizer': {'params': {'betas': [0.9, 'x']}}",
     "expected an array of two numbers"},
    {"'optimizer': {'type': 3}",
     "expected " IZ_OPTIMIZER_TYPES ", found 3 (an integer)"},
    {"'optimizer': {'type': 'AdmaW'}",
     "'AdmaW' is not one of " IZ_OPTIMIZER_TYPES "; did you mean"},
    {"'optimizer': {'type': 'Adagrad'}",
     "'Adagrad' is not one of " IZ_OPTIMIZER_TYPES "\n"},
    {"'run': {'output': 3}", "expected a string, found 3"},
    {"'data': {'path': ['a', 3]}", "data.path: expected strings, found 3"},
    {"'data': {'path': ['a', 'b,c']}", "data.path: 'b,c' has a comma"},
    {"'data': {'path': ['a', '']}", "data.path: '' is no member of a list"},
    {"'data': {'path': {}}", "expected a string or strings, found "},
    {"'model': {'width': 5000000000}", "an integer of 32 bits"},
    {"'model': {'name': '12345678'}", "model.name: 8 bytes, at most 7 fit"},
    {"'model': {'bias': 'auto'}", "model.bias: 'auto'"},
    {"'model': 3", "model: expected an object, found 3"},
    /* Rules say where they are wrong. */
    {"'parameters': {'match': '*'}",
     "parameters: expected an array of rules, found an object"},
    {"'parameters': [3]",
     "parameters[0]: expected an object, found 3 (an integer)"},
    {"'parameters': [{'lr_scale': 1}]", "parameters[0]: has no 'match'"},
    {"'parameters': [{'match': '*'}, {'match': '*', 'wieght_decay': 0}]",
     "parameters[1].wieght_decay: unknown key; did you mean weight_decay?"},
    {"'parameters': [{'match': '*', 'lr_scale': -1}]",
     "parameters[0].lr_scale: -1 is less than 0"},
    {"'parameters': [{'match': 3}]",
     "parameters[0].match: expected a string, found 3"},
    {"'parameters': [{'match': '*', 'frozen': true, 'lr_scale': 2}]",
     "parameters[0]: frozen: true, but"},
    {"'parameters': [{'match': '*', 'frozen': 1}]",
     "parameters[0].frozen: expected true or false"},
    /* Adapters need a rank and targets. */
    {"'lora': {'rank': 4}", "lora.targets: missing, and lora.rank is 4"},
    {"'lora': {'rank': 4, 'targets': ' , '}", "lora.targets: missing"},
    {"'lora': {'targets': '*'}",
     "lora.targets: there are no adapters: lora.rank is 0"},
    {"'lora': {'export': 'adapter'}", "lora.export: there are no adapters"},
    {"'lora': {'dropout': 0.1}", "lora.dropout: there are no adapters"},
    /* Pairs of texts have a loss of their own, and samples. */
    {"'loss': {'sft': 0.2}",
     "loss.sft: 0.2, but loss.type: cross_entropy has none"},
    {"'loss': {'beta': 0.2}",
     "loss.beta: 0.2, but loss.type: cross_entropy has none"},
    {"'loss': {'type': 'kto'}", "loss.type: 'kto' is not one of"},
    {"'loss': {'type': 'dpo'}, 'data': {'bytes': true}",
     "data.bytes: true, but loss.type needs shards of pairs"},
    {"'loss': {'type': 'dpo'}, 'data': {'bytes': false, 'document_end': 3}",
     "data.document_end: 3, but with loss.type each text is a sample"},
    {"'loss': {'type': 'dpo'}, 'data': {'bytes': false}, 'run': {'slices': 8}",
     "train_micro_batch_size_per_gpu: 8, but loss.type takes texts in pairs: "
     "use a multiple of 2 run.slices"},
    {"'lora': {'rank': 4, 'targets': '*', 'dropout': 1.0}", "lora.dropout: 1"},
    {"'lora': {'rank': 4, 'targets': '*', 'dropout': 0.5, 'use_dora': true}",
     "lora.dropout: 0.5, but lora.use_dora"},
    {"'lora': {'rank': 4, 'targets': '*', 'rank_pattern': {'x': 5000}}",
     "lora.rank_pattern: 5000"},
    {"'lora': {'rank': 4, 'targets': '*', 'alpha_pattern': ['x']}",
     "lora.alpha_pattern: "},
    {"'lora': {'use_qalora': true}", "lora.use_qalora: unknown key"},
    /* Presets are known. */
    {"'model': {'preset': 'toy-smal'}",
     "model.preset: unknown preset; did you mean toy-small?"},
    {"'model': {'preset': 3}", "unknown preset"},
    /* Rules between keys hold. */
    {"'bf16': {'enabled': true}, 'fp16': {'enabled': true}",
     "bf16.enabled and fp16.enabled are both true"},
    {"'data_types': {'grad_accum_dtype': 'bf16'}",
     "data_types.grad_accum_dtype: bf16, but parameters are fp32"},
    {"'bf16': {'enabled': true}, 'communication_data_type': 'fp32'",
     "communication_data_type: fp32, but gradients travel in the type of the "
     "parameters, bf16"},
    {"'optimizer': {'type': 'AdamW', 'params': {'adam_w_mode': false}}",
     "adam_w_mode: false contradicts type AdamW"},
    {"'optimizer': {'type': 'AdamW', 'params': {'torch_adam': true}}",
     "torch_adam: write optimizer.params.weight_decay too"},
    {"'optimizer': {'type': 'Lion', 'params': {'eps': 1e-8}}",
     "optimizer.params.eps: Lion has no such parameter"},
    {"'optimizer': {'type': 'Muon', 'params': {'bias_correction': true}}",
     "optimizer.params.bias_correction: Muon has no such parameter"},
    {"'optimizer': {'type': 'Muon', 'params': {'ns_method': 'fast'}}",
     "optimizer.params.ns_method: 'fast' is not one of"},
    {"'optimizer': {'type': 'Muon', 'params': {'muon_lr': 0}}",
     "optimizer.params.muon_lr: 0, but adam_lr is 0.001: freeze the matrices"},
    {"'optimizer': {'type': 'Muon', 'params': {'adam_lr': 1}}, 'scheduler': "
     "{'type': 'WarmupLR'}",
     "adam_lr: 1, muon_lr is 0.001, and WarmupLR has one rate for all"},
    {"'parameters': [{'match': '*', 'use_muon': false}]",
     "parameters: rule 0 has use_muon, and optimizer.type is AdamW"},
    {"'optimizer': {'type': 'Lion', 'params': {'bias_correction': true}}",
     "bias_correction: Lion has no such parameter"},
    {"'optimizer': {'type': 'Lion', 'params': {'adam_w_mode': true}}",
     "adam_w_mode: Lion has no such parameter"},
    {"'optimizer': {'type': 'Lion', 'params': {'nesterov': true}}",
     "nesterov: Lion has no such parameter"},
    {"'optimizer': {'type': 'Lion', 'params': {'dampening': 0}}",
     "optimizer.params.dampening: unknown key"},
    {"'optimizer': {'type': 'Muon', 'params': {'momentum': 1.5}}",
     "optimizer.params.momentum: 1.5"},
    {"'optimizer': {'type': 'Muon', 'params': {'ns_steps': 0}}",
     "optimizer.params.ns_steps: 0"},
    {"'optimizer': {'type': 'Muon', 'params': {'adjust_lr_fn': 'none'}}",
     "match_rms_adamw"},
    {"'optimizer': {'type': 'Muon', 'params': {'per_head_muon': true}}",
     "set false"},
    {"'optimizer': {'type': 'Muon', 'params': {'muon_rate': 1}}",
     "muon_rate: unknown key"},
    {"'scheduler': {'type': 'WarmupLR', 'params': {'total_num_steps': 3}}",
     "scheduler.params.total_num_steps: WarmupLR has no such parameter"},
    {"'scheduler': {'type': 'WarmupCosineLR', 'params': {'total_num_steps': 3, "
     "'warmup_max_lr': 1}}",
     "warmup_max_lr: WarmupCosineLR has no such parameter"},
    {"'scheduler': {'params': {'warmup_num_steps': 3}}",
     "warmup_num_steps: a constant rate has no such parameter"},
    {"'scheduler': {'type': 'WarmupDecayLR'}",
     "total_num_steps: missing; 'auto' takes run.steps"},
    {"'scheduler': {'type': 'OneCycle'}",
     "'OneCycle' is not one of null|WarmupLR|WarmupDecayLR|"},
    {"'fp16': {'enabled': true, 'initial_scale_power': 1, 'min_loss_scale': 4}",
     "fp16.min_loss_scale: 4 is above the first scale"},
    {"'zero_optimization': {'stage': 2, 'offload_param': {'device': 'cpu'}}",
     "offload_param.device: needs zero_optimization.stage 3, found 2"},
    {"'zero_optimization': {'stage': 2, 'offload_param': {'frozen_device': "
     "'cpu'}}",
     "offload_param.frozen_device: needs zero_optimization.stage 3, found 2"},
    {"'zero_optimization': {'stage': 3, 'offload_param': {'frozen_device': "
     "'nvme'}}",
     "offload_param.nvme_path: missing, and offload_param.frozen_device is "
     "nvme"},
    {"'zero_optimization': {'stage': 3, 'zero_hpz_partition_size': 2, "
     "'offload_param': {'frozen_device': 'cpu'}}",
     "frozen_device: zero_optimization.zero_hpz_partition_size is 2"},
    {"'zero_optimization': {'stage': 3, 'offload_param': {'frozen_device': "
     "'disk'}}",
     "'disk' is not one of null|none|cpu|nvme"},
    {"'run': {'save_mode': 'async', 'nvme_checksum': true}, "
     "'zero_optimization': {'stage': 3, 'offload_param': {'frozen_device': "
     "'nvme', 'nvme_path': '/x'}}",
     "run.save_mode: async reads parts"},
    {"'run': {'save_mode': 'async', 'state_dtype': 'bf16'}, "
     "'zero_optimization': {'stage': 1, 'offload_optimizer': {'device': "
     "'nvme', 'nvme_path': '/x'}}",
     "run.save_mode: async cannot read states of run.state_dtype from nvme"},
    {"'run': {'save_mode': 'async', 'master': 'remainder'}, 'bf16': "
     "{'enabled': true}",
     "run.save_mode: async cannot put the two halves of run.master together"},
    {"'run': {'master': 'remainder'}",
     "run.master: remainder, but parameters are fp32"},
    {"'run': {'output': ''}", "run.output: is empty: name a directory"},
    {"'zero_optimization': {'offload_optimizer': {'device': 'cpu'}}",
     "offload_optimizer.device: needs zero_optimization.stage 1, 2 or 3, found "
     "0"},
    {"'zero_optimization': {'stage': 1, 'offload_optimizer': {'device': "
     "'nvme'}}",
     "offload_optimizer.nvme_path: missing, and offload_optimizer.device is "
     "nvme"},
    {"'zero_optimization': {'stage': 3, 'offload_param': {'device': 'nvme'}}",
     "offload_param.nvme_path: missing, and offload_param.device is nvme"},
    {"'zero_optimization': {'stage': 3, 'offload_optimizer': {'ratio': 0.4}}",
     "ratio: 0.4 divides an optimizer that is offloaded to cpu, "
     "offload_optimizer.device is none"},
    {"'zero_optimization': {'stage': 1, 'offload_optimizer': {'device': "
     "'nvme', 'nvme_path': '/x', 'ratio': 0}}",
     "ratio: 0 divides an optimizer that is offloaded to cpu, "
     "offload_optimizer.device is nvme"},
    {"'zero_optimization': {'stage': 3, 'offload_optimizer': {'device': 'cpu', "
     "'ratio': 0.4}, 'offload_param': {'device': 'nvme', 'nvme_path': '/x'}}",
     "ratio: 0.4 needs offload_param.device none or cpu, found nvme"},
    {"'zero_optimization': {'stage': 3, 'offload_optimizer': {'device': 'cpu', "
     "'ratio': 0.4}}, 'run': {'device': 'cpu'}",
     "ratio: 0.4 leaves chunks to a GPU, run.device is cpu"},
    {"'zero_optimization': {'stage': 2, 'zero_hpz_partition_size': 2}",
     "zero_hpz_partition_size: 2 needs zero_optimization.stage 3, found 2"},
    {"'zero_optimization': {'stage': 3, 'zero_hpz_partition_size': 2, "
     "'offload_param': {'device': 'nvme', 'nvme_path': '/x'}}",
     "zero_hpz_partition_size: 2 needs offload_param.device none or cpu"},
    {"'zero_optimization': {'stage': 3, 'zero_hpz_partition_size': 2}, "
     "'model': {'base_dtype': 'nf4'}",
     "model.base_dtype: nf4, and zero_optimization.zero_hpz_partition_size"},
    {"'zero_optimization': {'zero_hpz_partition_size': 0}",
     "zero_hpz_partition_size: 0 is not in 1"},
    {"'zero_optimization': {'mics_shard_size': 2}", "mics_shard_size: 2"},
    {"'fp16': {'enabled': true}, 'run': {'cpu_products': 'bf16'}",
     "cpu_products: bf16, but parameters are fp16; set bf16.enabled"},
    {"'run': {'gpu_attention': 'cudnn'}",
     "gpu_attention: cudnn, but parameters are fp32, which cuDNN would"},
    {"'run': {'gpu_attention_backward': 'cudnn'}",
     "gpu_attention_backward: cudnn, but parameters are fp32, which cuDNN"},
    {"'zero_optimization': {'contiguous_gradients': 3}",
     "contiguous_gradients: expected a boolean, found 3"},
    {"'zero_optimization': {'max_live_parameters': -1}",
     "zero_optimization.stage3_max_live_parameters: -1 is less than 0"},
    {"'zero_optimization': {'max_live_parameters': 1, "
     "'stage3_max_live_parameters': 1}",
     "stage3_max_live_parameters: given twice"},
    {"'zero_optimization': {'stage': 1, 'cpu_offload': true, "
     "'offload_optimizer': {'device': 'cpu'}}",
     "offload_optimizer.device: given twice"},
    {"'activation_checkpointing': {'nvme_path': '/tmp'}",
     "nvme_path: /tmp, but activation_checkpointing.cpu_checkpointing is "
     "false"},
    {"'steps_per_print': 3, 'run': {'log_interval': 4}",
     "steps_per_print: 3, but run.log_interval is 4"},
    {"'run': {'eval_interval': 4}",
     "run.eval_interval: 4, but run.eval_batches is 0"},
    /* Numbers that are none in what they are for. */
    {"'fp16': {'loss_scale': 1e-320}", "loss_scale: 1e-320 is nearer to 0"},
    {"'fp16': {'loss_scale': 1e-9}", "loss_scale: 1e-09 leaves nothing of a"},
    {"'fp16': {'loss_scale': 9007199254740993}", "loss_scale: expected a num"},
    {"'run': {'steps': 1e999}", "real number overflow"},
    {"'run': {'seed': 9007199254740994.0}", "seed: expected an integer"},
    {"'gradient_clipping': 1e-40", "gradient_clipping: 1e-40 is nearer to 0"},
    {"'optimizer': {'params': {'eps': 0}}", "eps: 0 is not in 1e-30..1"},
    {"'optimizer': {'params': {'betas': [0.9, 0.99999999]}}", "betas: 0.99999"},
    {"'optimizer': {'params': {'betas': [1e-39, 0.9]}}", "1e-39 is nearer to"},
    {"'optimizer': {'params': {'weight_decay': -0.1}}", "weight_decay: -0.1"},
    {"'optimizer': {'params': {'lr': 0.1, 'weight_decay': 10}}",
     "weight_decay: 10 times the rate is 1: a step would take all"},
    {"'optimizer': {'params': {'lr': 0.1}}, 'parameters': [{'match': '*', "
     "'lr_scale': 100, 'weight_decay': 0.2}]",
     "parameters[0].weight_decay: 0.2 times the rate is 2: a step"},
    {"'scheduler': {'type': 'WarmupLR', 'params': {'warmup_min_lr': 0.1}}",
     "warmup_min_lr: 0.1, but warmup_max_lr is 0.001: the rate would fall"},
    {"'lora': {'rank': 1, 'targets': '*', 'dropout': 1}", "dropout: 1 is not"},
    /* A rule must not blame a key for the fault of another. */
    {"'scheduler': {'type': 'WarmupLR', 'params': {'warmup_min_lr': 0.1, "
     "'warmup_max_lr': -1}}",
     "warmup_max_lr: -1 is less than 0"},
    {"'zero_optimization': {'stage': 5, 'offload_param': {'device': 'cpu'}, "
     "'offload_optimizer': {'device': 'cpu'}}",
     "stage: 5 is not in 0..3"},
    {"'scheduler': {'type': 'Warmup', 'params': {'total_num_steps': 5}}",
     "scheduler.type"},
    {"'scheduler': {'type': 'WarmupDecayLR', 'params': {'total_num_steps': "
     "'x'}}",
     "total_num_steps: expected an integer"},
    {"'zero_optimization': {'stage': 3, 'offload_param': {'device': 'nvme', "
     "'nvme_path': 3}}",
     "nvme_path: expected a string"},
    {"'run': {'eval_interval': 1, 'eval_batches': 'x'}",
     "eval_batches: expected"},
    {"'bf16': {'enabled': 'x'}, 'data_types': {'grad_accum_dtype': 'bf16'}",
     "bf16.enabled: expected"},
};

static void every_refusal_says_why(void **state)
{
    for (int i = 0; i < N_OF(refusals); i++)
        assert_refused(refusals[i][0], refusals[i][1]);
}

static void all_faults_are_told_at_once(void **state)
{
    assert_int_equal(
        read_text("{'train_batch_size': 0, 'lr': 3, 'amp': {'enabled': true}, "
                  "'zero_optimization': {'stage': 9, 'reduce_scatter': "
                  "2}, 'run': {'steps': 'auto'}, 'model': {'layers': "
                  "0}}"),
        -EINVAL);
    assert_said("train_batch_size: 0 is less than 1");
    assert_said("lr: unknown key; did you mean optimizer.params.lr?");
    assert_said("amp: not supported. Use bf16 or fp16.");
    assert_said("zero_optimization.stage: 9 is not in 0..3");
    assert_said("zero_optimization.reduce_scatter: expected a boolean");
    assert_said("run.steps: \"auto\" cannot be resolved here");
    assert_said("model.layers: 0 is not in 1..1000");
    assert_int_equal(lines_of(said), 7);
}

static void bad_json_has_line_and_column(void **state)
{
    static const char *const cases[][2] = {
        {"{\n  'train_batch_size': 8,\n  }\n",
         "config.json: line 3, column 3: "},
        {"{'run': {}, 'run': {}}", "duplicate object key"},
        {"[]", "expected an object in braces"},
        {"3", ""},
        {"", "line 1, column 0"},
        {"{} x", ""},
    };
    for (int i = 0; i < N_OF(cases); i++)
        read_refused(cases[i][0], NULL, 1, cases[i][1]);
}

static void a_file_that_cannot_be_read_says_why(void **state)
{
    assert_int_equal(read_file("/nonexistent/a.json", NULL, 0, 1), -ENOENT);
    assert_said("/nonexistent/a.json: cannot be read: No such file");
    assert_true(read_file("/", NULL, 0, 1) < 0);
    assert_said("/: cannot be read: Is a directory");
    read_refused(NULL, NULL, 1, "config: train_batch_size: missing");
    assert_int_equal(iz_config_read(&config, NULL, "/", NULL, 0, 1, NULL, NULL),
                     -EINVAL);
}

static void a_program_without_a_model_has_no_model_section(void **state)
{
    const char *path = write_text(in_folder("config.json"),
                                  json("{'train_batch_size': 8, 'model': {}}"));
    assert_fails(iz_config_read(&config, NULL, path, NULL, 0, 1, NULL, stderr),
                 -EINVAL, "model: unknown key");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_refusal_says_why),
        cmocka_unit_test(all_faults_are_told_at_once),
        cmocka_unit_test(bad_json_has_line_and_column),
        cmocka_unit_test(a_file_that_cannot_be_read_says_why),
        cmocka_unit_test(a_program_without_a_model_has_no_model_section),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_configs);
}
