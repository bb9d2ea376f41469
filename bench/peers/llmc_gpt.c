/* SPDX-License-Identifier: Apache-2.0 */
/* usage: llmc_gpt LAYERS HEADS WIDTH SEQ VOCAB BATCH STEPS
 * Trains the GPT of models/gpt2.c with llm.c's program for CPUs: its functions,
 * the same shapes, random weights and tokens, AdamW; it does not clip.  Made
 * from a checkout of llm.c, with the flags of its Makefile and OpenMP:
 *   cc -Ofast -march=native -fopenmp -DOMP -I LLM.C bench/peers/llmc_gpt.c -lm
 * Prints a JSON object: seconds of each step. */
#define TESTING /* no main of its own */
#include "train_gpt2.c"

static double llmc_gpt_now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* With numbers of standard deviation 0.02, as a model starts. */
static void llmc_gpt_fill(GPT2 *model, GPT2Config config)
{
    model->config = config;
    fill_in_parameter_sizes(model->param_sizes, config);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++)
        model->num_parameters += model->param_sizes[i];
    model->params_memory =
        malloc_and_point_parameters(&model->params, model->param_sizes);
    for (size_t i = 0; i < model->num_parameters; i++)
        model->params_memory[i] =
            0.035f * ((float)rand() / (float)RAND_MAX * 2 - 1);
}

int main(int argc, char **argv)
{
    if (argc != 8) {
        fprintf(stderr, "usage: llmc_gpt LAYERS HEADS WIDTH SEQ VOCAB BATCH "
                        "STEPS\n");
        return 2;
    }
    int seq = atoi(argv[4]), vocab = atoi(argv[5]);
    int batch = atoi(argv[6]), steps = atoi(argv[7]), tokens = batch * seq;
    GPT2 model = {0};
    llmc_gpt_fill(&model,
                  (GPT2Config){.max_seq_len = seq,
                               .vocab_size = vocab,
                               .padded_vocab_size = (vocab + 127) / 128 * 128,
                               .num_layers = atoi(argv[1]),
                               .num_heads = atoi(argv[2]),
                               .channels = atoi(argv[3])});
    int *x = malloc(sizeof(int) * (size_t)tokens);
    int *y = malloc(sizeof(int) * (size_t)tokens);
    double *seconds = malloc(sizeof(double) * (size_t)steps);
    for (int step = 0; step < steps; step++) {
        for (int i = 0; i < tokens; i++)
            x[i] = rand() % vocab, y[i] = rand() % vocab;
        double begin = llmc_gpt_now_s();
        gpt2_forward(&model, x, y, (size_t)batch, (size_t)seq);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        gpt2_update(&model, 3e-4f, 0.9f, 0.999f, 1e-8f, 0.01f, step + 1);
        seconds[step] = llmc_gpt_now_s() - begin;
    }
    printf("{\"loss\": %.9g, \"seconds\": [", (double)model.mean_loss);
    for (int step = 0; step < steps; step++)
        printf("%s%.9f", step ? ", " : "", seconds[step]);
    printf("]}\n");
    gpt2_free(&model);
    free(x);
    free(y);
    free(seconds);
    return 0;
}
