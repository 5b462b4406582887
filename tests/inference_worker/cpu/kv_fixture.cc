#include "tests/inference_worker/cpu/kv_fixture.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace promptcache::worker::cpu {
namespace {

uint16_t* At(const KvLayout& layout, const KvSpan& span, size_t plane_offset,
             uint32_t kv_head, uint32_t token) {
  const uint32_t index = span.view.first_token + token;
  std::byte* const page = span.write_table[index / layout.page_tokens];
  return reinterpret_cast<uint16_t*>(
      page + plane_offset + kv_head * layout.head_stride_bytes() +
      index % layout.page_tokens * layout.token_stride_bytes());
}

// The state of one query head while views go by.
struct Reference {
  std::vector<double> logits;
  std::vector<const uint16_t*> values;

  // All but the last `window`.
  void Forget(uint32_t window) {
    if (window == 0 || logits.size() <= window) return;
    logits.erase(logits.begin(), logits.end() - window);
    values.erase(values.begin(), values.end() - window);
  }

  std::vector<double> Output(uint32_t head_dim) const {
    const double maximum = *std::max_element(logits.begin(), logits.end());
    std::vector<double> out(head_dim);
    double total = 0;
    for (size_t t = 0; t < logits.size(); ++t) {
      const double weight = std::exp(logits[t] - maximum);
      total += weight;
      for (uint32_t d = 0; d < head_dim; ++d) {
        out[d] += weight * FromBf16(values[t][d]);
      }
    }
    for (double& x : out) x /= total;
    return out;
  }
};

}  // namespace

KvSpan MakeEmptySpan(const KvLayout& layout, const SpanSpec& spec) {
  KvSpan span;
  const uint64_t num_pages =
      layout.PagesFor(spec.first_token + spec.num_tokens);
  for (uint64_t i = 0; i < num_pages; ++i) {
    span.pages.emplace_back(layout.page_bytes(), std::byte{0xff});
  }
  for (std::vector<std::byte>& page : span.pages) {
    span.table.push_back(page.data());
    span.write_table.push_back(page.data());
  }
  span.view = {.pages = span.table.data(),
               .first_token = spec.first_token,
               .num_tokens = spec.num_tokens,
               .position_offset = spec.position_offset,
               .local_position = spec.local_position};
  return span;
}

KvSpan MakeSpan(const KvLayout& layout, const SpanSpec& spec) {
  KvSpan span = MakeEmptySpan(layout, spec);
  for (uint32_t token = 0; token < spec.num_tokens; ++token) {
    std::mt19937 engine(spec.seed * 1000003u + token);
    std::uniform_real_distribution<float> uniform(-1.7f, 1.7f);
    for (uint32_t layer = 0; layer < layout.num_layers; ++layer) {
      for (uint32_t head = 0; head < layout.num_kv_heads; ++head) {
        for (uint32_t d = 0; d < layout.head_dim; ++d) {
          KeyOf(layout, span, layer, head, token)[d] = ToBf16(uniform(engine));
          ValueOf(layout, span, layer, head, token)[d] =
              ToBf16(uniform(engine));
        }
      }
    }
  }
  return span;
}

uint16_t* KeyOf(const KvLayout& layout, const KvSpan& span, uint32_t layer,
                uint32_t kv_head, uint32_t token) {
  return At(layout, span, layout.key_offset_bytes(layer), kv_head, token);
}

uint16_t* ValueOf(const KvLayout& layout, const KvSpan& span, uint32_t layer,
                  uint32_t kv_head, uint32_t token) {
  return At(layout, span, layout.value_offset_bytes(layer), kv_head, token);
}

std::vector<double> RotateReference(std::span<const float> x,
                                    const RopeTable::Options* rope,
                                    int32_t position) {
  std::vector<double> out(x.begin(), x.end());
  if (rope == nullptr) return out;
  const size_t pairs = rope->inv_freq.size();
  for (size_t i = 0; i < pairs; ++i) {
    const bool split = rope->pairing == Pairing::kHalfSplit;
    const size_t a = split ? i : 2 * i;
    const size_t b = split ? i + pairs : 2 * i + 1;
    const double angle = position * rope->inv_freq[i];
    const double c = std::cos(angle) * rope->factor;
    const double s = std::sin(angle) * rope->factor;
    out[a] = x[a] * c - x[b] * s;
    out[b] = x[b] * c + x[a] * s;
  }
  return out;
}

float TestBias(uint32_t head, int32_t distance) {
  return std::sin(0.7f * static_cast<float>(distance)) +
         0.02f * static_cast<float>(head) * static_cast<float>(distance);
}

std::vector<double> AttendReference(const AttentionShape& shape,
                                    const RopeTable::Options* rope,
                                    const AttentionGroup& group,
                                    std::span<const KvSpan* const> spans,
                                    uint32_t row) {
  const KvLayout& layout = shape.layout;
  const uint32_t dim = layout.head_dim;
  std::vector<double> result;
  for (uint32_t head = 0; head < shape.num_heads; ++head) {
    const uint32_t kv_head = head / (shape.num_heads / layout.num_kv_heads);
    const std::span<const float> query(
        group.queries + row * group.query_stride + head * dim, dim);
    Reference reference;
    for (const KvSpan* span : spans) {
      const bool own = span == spans.back();
      const uint32_t seen =
          !own ? span->view.num_tokens
          : group.own.num_tokens == 0
              ? 0
              : group.own.num_tokens - group.num_rows + row + 1;
      const std::vector<double> q =
          RotateReference(query, rope,
                          group.position + static_cast<int32_t>(row) -
                              span->view.position_offset);
      for (uint32_t t = 0; t < seen; ++t) {
        const uint16_t* k = KeyOf(layout, *span, shape.layer, kv_head, t);
        const uint16_t* v = ValueOf(layout, *span, shape.layer, kv_head, t);
        double logit = 0;
        for (uint32_t d = 0; d < dim; ++d) {
          logit += q[d] * FromBf16(k[d]);
        }
        logit *= shape.scale;
        const int32_t distance = span->view.position_offset +
                                 span->view.local_position +
                                 static_cast<int32_t>(t) - group.position -
                                 static_cast<int32_t>(row);
        if (shape.alibi_slopes != nullptr) {
          logit += double{shape.alibi_slopes[head]} * distance;
        }
        if (shape.distance_bias != nullptr) {
          const int32_t reach = shape.distance_bias->reach();
          logit += TestBias(head, std::clamp(distance, -reach, reach));
        }
        reference.logits.push_back(logit);
        reference.values.push_back(v);
      }
    }
    reference.Forget(shape.window);
    const std::vector<double> out = reference.Output(dim);
    result.insert(result.end(), out.begin(), out.end());
  }
  return result;
}

}  // namespace promptcache::worker::cpu
