/* SPDX-License-Identifier: Apache-2.0 */
/* The one C++ file: SentencePiece has no other interface. */
#include "runtime/tokenizer_sp.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sentencepiece_processor.h>
#include <string>
#include <vector>

struct iz_sp {
    sentencepiece::SentencePieceProcessor model;
};

int iz_sp_open(struct iz_sp **out, const char *name, const void *model,
               int64_t bytes)
{
    const char *text = static_cast<const char *>(model);
    struct iz_sp *s = new (std::nothrow) iz_sp;

    *out = s;
    if (!s)
        return -ENOMEM;
    const auto status = s->model.LoadFromSerializedProto(
        std::string(text, static_cast<size_t>(bytes)));
    if (status.ok())
        return 0;
    fprintf(stderr, "izar: tokenizer: %s: %s\n", name,
            status.ToString().c_str());
    return -EINVAL;
}

void iz_sp_close(struct iz_sp **s)
{
    delete *s;
    *s = nullptr;
}

int32_t iz_sp_vocab(const struct iz_sp *s)
{
    return s->model.GetPieceSize();
}

int32_t iz_sp_find(const struct iz_sp *s, const char *piece)
{
    int id = s->model.PieceToId(piece);

    return s->model.IdToPiece(id) == piece ? id : -1;
}

int32_t iz_sp_end(const struct iz_sp *s)
{
    return s->model.eos_id();
}

int iz_sp_encode(const struct iz_sp *s, const char *text, int64_t bytes,
                 struct iz_ids *out)
{
    std::vector<int> ids;
    const auto status = s->model.Encode(
        absl::string_view(text, static_cast<size_t>(bytes)), &ids);

    if (!status.ok()) {
        fprintf(stderr, "izar: tokenizer: %s\n", status.ToString().c_str());
        return -EINVAL;
    }
    if (iz_ids_room(out, static_cast<int64_t>(ids.size())))
        return -ENOMEM;
    for (int id : ids)
        out->id[out->count++] = id;
    return 0;
}

char *iz_sp_decode(const struct iz_sp *s, const int32_t *id, int64_t n,
                   int64_t *bytes)
{
    std::vector<int> ids;
    std::string text;

    for (int64_t i = 0; i < n; i++)
        if (id[i] >= 0 && id[i] < s->model.GetPieceSize())
            ids.push_back(id[i]);
    if (!s->model.Decode(ids, &text).ok())
        text.clear();
    *bytes = static_cast<int64_t>(text.size());
    char *out = static_cast<char *>(malloc(text.size() + 1));
    if (out)
        memcpy(out, text.c_str(), text.size() + 1);
    return out;
}
