#include "attention_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

#include "common/kv_view.h"
#include "cuda/kernels/attention_plan.h"
#include "cuda/kernels/device.cuh"

namespace promptcache::gpu {
namespace {

constexpr uint32_t kLayers = 2;
constexpr uint32_t kLayer = 1;

float FromBits(ElementType type, uint16_t bits) {
  if (type == ElementType::kBf16) {
    __nv_bfloat16_raw raw;
    raw.x = bits;
    return __bfloat162float(__nv_bfloat16(raw));
  }
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

uint16_t ToBits(ElementType type, float value) {
  if (type == ElementType::kBf16) {
    return static_cast<__nv_bfloat16_raw>(__float2bfloat16(value)).x;
  }
  return static_cast<__half_raw>(__float2half(value)).x;
}

struct Freer {
  void operator()(void* p) const { cudaFree(p); }
};
using DevicePtr = std::unique_ptr<void, Freer>;

DevicePtr NewDevice(size_t bytes) {
  void* p = nullptr;
  if (cudaMalloc(&p, std::max<size_t>(bytes, 16)) != cudaSuccess) return {};
  return DevicePtr(p);
}

template <class T>
DevicePtr ToDevice(const std::vector<T>& values) {
  DevicePtr p = NewDevice(values.size() * sizeof(T));
  cudaMemcpy(p.get(), values.data(), values.size() * sizeof(T),
             cudaMemcpyHostToDevice);
  return p;
}

// KV of one module: [kv_head][token][head_dim] as the reference reads it.
struct Module {
  std::vector<float> keys, values;
  std::vector<const std::byte*> pages;
};

class Runner {
 public:
  explicit Runner(const AttentionCase& c)
      : c_(c), random_(c.seed), head_bytes_(size_t{c.head_dim} * 2) {}

  AttentionOutcome Run();

 private:
  size_t PlaneBytes() const {
    return head_bytes_ * c_.page_tokens * c_.num_kv_heads;
  }
  size_t PageBytes() const { return 2 * kLayers * PlaneBytes(); }
  void MakeModules();
  void MakeGroups();
  void MakeTables();
  AttentionParams Params() const;
  cudaError_t Launch();
  std::vector<double> Expected(size_t group, uint32_t row, uint32_t head) const;
  void Compare(AttentionOutcome* outcome) const;
  std::vector<uint16_t> Random(size_t count, float spread) {
    std::normal_distribution<float> normal(0, spread);
    std::vector<uint16_t> values(count);
    for (uint16_t& v : values) v = ToBits(c_.type, normal(random_));
    return values;
  }

  std::vector<float> Widen(const std::vector<uint16_t>& bits) const {
    std::vector<float> values;
    values.reserve(bits.size());
    for (uint16_t b : bits) values.push_back(FromBits(c_.type, b));
    return values;
  }

  const AttentionCase& c_;
  std::mt19937 random_;
  const size_t head_bytes_;
  std::vector<ModuleSpec> specs_;  // the case's, then each group's own
  std::vector<Module> modules_;
  DevicePtr pages_;
  std::vector<std::vector<KvView>> views_;
  std::vector<KvView> own_;
  std::vector<AttentionGroup> groups_;
  uint32_t num_rows_ = 0;
  std::vector<uint16_t> q_, out_;
  std::vector<double> frequencies_;
  std::vector<float> slopes_, bias_;
  DevicePtr device_q_, device_out_, rope_, device_slopes_, device_bias_;
  DevicePtr device_plan_, states_;
  AttentionPlan plan_;
};

void Runner::MakeModules() {
  specs_ = c_.modules;
  for (const GroupSpec& group : c_.groups) {
    specs_.push_back({.tokens = group.own_tokens,
                      .first_slot = group.own_tokens == 0 ? 0u : 3u});
  }
  size_t num_pages = 1;  // one that nobody uses
  for (ModuleSpec& spec : specs_) {
    spec.first_slot %= c_.page_tokens;
    num_pages +=
        (spec.first_slot + spec.tokens + c_.page_tokens - 1) / c_.page_tokens;
  }
  std::vector<size_t> order(num_pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_);
  pages_ = NewDevice(num_pages * PageBytes());
  // Slots of no token stay what fresh memory is: NaN.
  std::vector<uint16_t> host(num_pages * PageBytes() / 2, 0xffff);
  auto next = order.begin();
  for (const ModuleSpec& spec : specs_) {
    Module module;
    const size_t count = size_t{spec.tokens} * c_.num_kv_heads * c_.head_dim;
    const std::vector<uint16_t> keys = Random(count, 1.5f);
    const std::vector<uint16_t> values = Random(count, 1.0f);
    module.keys = Widen(keys);
    module.values = Widen(values);
    const uint32_t slots = spec.first_slot + spec.tokens;
    for (uint32_t s = 0; s < slots; s += c_.page_tokens) {
      module.pages.push_back(static_cast<std::byte*>(pages_.get()) +
                             *next * PageBytes());
      ++next;
    }
    for (uint32_t head = 0; head < c_.num_kv_heads; ++head) {
      for (uint32_t t = 0; t < spec.tokens; ++t) {
        const uint32_t slot = spec.first_slot + t;
        const auto page =
            static_cast<size_t>(module.pages[slot / c_.page_tokens] -
                                static_cast<std::byte*>(pages_.get()));
        const size_t at =
            page + 2 * kLayer * PlaneBytes() +
            (size_t{head} * c_.page_tokens + slot % c_.page_tokens) *
                head_bytes_;
        const size_t from = (size_t{head} * spec.tokens + t) * c_.head_dim;
        std::memcpy(&host[at / 2], &keys[from], head_bytes_);
        std::memcpy(&host[(at + PlaneBytes()) / 2], &values[from], head_bytes_);
      }
    }
    modules_.push_back(std::move(module));
  }
  cudaMemcpy(pages_.get(), host.data(), host.size() * 2,
             cudaMemcpyHostToDevice);
}

void Runner::MakeGroups() {
  views_.resize(c_.groups.size());
  for (size_t g = 0; g < c_.groups.size(); ++g) {
    const GroupSpec& spec = c_.groups[g];
    for (const ViewSpec& v : spec.visible) {
      const ModuleSpec& module = specs_[v.module];
      views_[g].push_back({.pages = modules_[v.module].pages.data(),
                           .first_token = module.first_slot,
                           .num_tokens = module.tokens,
                           .position_offset = v.position_offset,
                           .local_position = module.local_position});
    }
    const size_t own = c_.modules.size() + g;
    own_.push_back({.pages = modules_[own].pages.data(),
                    .first_token = specs_[own].first_slot,
                    .num_tokens = spec.own_tokens,
                    .position_offset =
                        spec.position -
                        static_cast<int32_t>(spec.own_tokens - spec.num_rows)});
    num_rows_ += spec.num_rows;
  }
  uint32_t row = 0;
  for (size_t g = 0; g < c_.groups.size(); ++g) {
    groups_.push_back({.first_row = row,
                       .num_rows = c_.groups[g].num_rows,
                       .position = c_.groups[g].position,
                       .visible = views_[g],
                       .own = own_[g]});
    row += c_.groups[g].num_rows;
  }
  q_ = Random(size_t{num_rows_} * c_.num_heads * c_.head_dim, 1.0f);
  device_q_ = ToDevice(q_);
  out_.assign(q_.size(), 0xffff);
  device_out_ = ToDevice(out_);
}

void Runner::MakeTables() {
  if (c_.rope_pairs > 0) {
    int32_t reach = 1;
    for (const AttentionGroup& group : groups_) {
      const auto last = group.position + static_cast<int32_t>(group.num_rows);
      reach = std::max({reach, last, -group.position,
                        static_cast<int32_t>(group.own.num_tokens)});
      for (const KvView& view : group.visible) {
        reach = std::max({reach, std::abs(last - view.position_offset),
                          std::abs(group.position - view.position_offset),
                          std::abs(view.position_offset)});
      }
    }
    std::vector<float> table;
    for (uint32_t i = 0; i < c_.rope_pairs; ++i) {
      frequencies_.push_back(std::pow(10000.0, -1.0 * i / c_.rope_pairs));
    }
    for (int32_t position = 0; position <= reach; ++position) {
      for (double f : frequencies_) {
        table.push_back(
            static_cast<float>(std::cos(position * f) * c_.rope_factor));
      }
      for (double f : frequencies_) {
        table.push_back(
            static_cast<float>(std::sin(position * f) * c_.rope_factor));
      }
    }
    rope_ = ToDevice(table);
  }
  if (c_.alibi) {
    for (uint32_t h = 0; h < c_.num_heads; ++h) {
      slopes_.push_back(std::exp2(-8.0f * static_cast<float>(h + 1) /
                                  static_cast<float>(c_.num_heads)));
    }
    device_slopes_ = ToDevice(slopes_);
  }
  if (c_.bias_reach >= 0) {
    const auto row = static_cast<size_t>(2 * c_.bias_reach + 1);
    std::normal_distribution<float> normal;
    bias_.resize(row * c_.num_heads);
    for (float& value : bias_) value = normal(random_);
    device_bias_ = ToDevice(bias_);
  }
}

AttentionParams Runner::Params() const {
  AttentionGrid grid = plan_.grid();
  grid.large_items += c_.surplus_blocks;
  grid.small_items += c_.surplus_blocks;
  grid.merged_rows += c_.surplus_blocks;
  return {
      .type = c_.type,
      .head_dim = c_.head_dim,
      .num_heads = c_.num_heads,
      .num_kv_heads = c_.num_kv_heads,
      .plan = static_cast<const std::byte*>(device_plan_.get()),
      .grid = grid,
      .states = static_cast<float*>(states_.get()),
      .q = device_q_.get(),
      .q_stride = size_t{c_.num_heads} * c_.head_dim,
      .out = device_out_.get(),
      .out_stride = size_t{c_.num_heads} * c_.head_dim,
      .key_offset_bytes = 2 * kLayer * PlaneBytes(),
      .value_offset_bytes = (2 * kLayer + 1) * PlaneBytes(),
      .head_stride_bytes = head_bytes_ * c_.page_tokens,
      .page_tokens = c_.page_tokens,
      .scale = 1.0f / std::sqrt(static_cast<float>(c_.head_dim)),
      .rope = static_cast<const float*>(rope_.get()),
      .rope_pairs = c_.rope_pairs,
      .rope_interleaved = c_.rope_interleaved,
      .rope_factor = static_cast<float>(c_.rope_factor),
      .rotate_keys = c_.rotate_keys,
      .alibi_slopes = static_cast<const float*>(device_slopes_.get()),
      .distance_bias = static_cast<const float*>(device_bias_.get()),
      .bias_reach = std::max(0, c_.bias_reach),
      .window = c_.window,
  };
}

cudaError_t Runner::Launch() {
  plan_.Build({.head_dim = c_.head_dim,
               .num_heads = c_.num_heads,
               .num_kv_heads = c_.num_kv_heads,
               .page_tokens = c_.page_tokens,
               .num_multiprocessors = c_.num_multiprocessors,
               .batch_invariant = c_.batch_invariant,
               .rotate_keys = c_.rotate_keys},
              groups_);
  // As the engine does: the plan goes with the copy stream, and the compute
  // stream waits for it.
  cudaStream_t copy = nullptr;
  cudaStream_t compute = nullptr;
  cudaEvent_t copied = nullptr;
  cudaStreamCreateWithFlags(&copy, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking);
  cudaEventCreateWithFlags(&copied, cudaEventDisableTiming);
  device_plan_ = NewDevice(plan_.bytes().size());
  states_ = NewDevice(plan_.StateBytes());
  cudaMemcpyAsync(device_plan_.get(), plan_.bytes().data(),
                  plan_.bytes().size(), cudaMemcpyHostToDevice, copy);
  cudaEventRecord(copied, copy);
  cudaStreamWaitEvent(compute, copied, 0);
  cudaError_t error = LaunchAttention(Params(), compute);
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(out_.data(), device_out_.get(), out_.size() * 2,
                            cudaMemcpyDeviceToHost, compute);
  }
  cudaStreamSynchronize(compute);
  cudaEventDestroy(copied);
  cudaStreamDestroy(compute);
  cudaStreamDestroy(copy);
  return error;
}

// Plain softmax attention, every step in double.
std::vector<double> Runner::Expected(size_t g, uint32_t row,
                                     uint32_t head) const {
  const AttentionGroup& group = groups_[g];
  const uint32_t dim = c_.head_dim;
  const uint32_t kv_head = head / (c_.num_heads / c_.num_kv_heads);
  const int32_t position = group.position + static_cast<int32_t>(row);
  std::vector<double> q(dim);
  for (uint32_t d = 0; d < dim; ++d) {
    q[d] = FromBits(
        c_.type,
        q_[((size_t{group.first_row} + row) * c_.num_heads + head) * dim + d]);
  }
  struct Seen {
    double logit;
    const float* value;
  };
  std::vector<Seen> seen;
  const size_t slots = group.visible.size() + 1;
  for (size_t slot = 0; slot < slots; ++slot) {
    const bool own = slot + 1 == slots;
    const KvView& view = own ? group.own : group.visible[slot];
    const Module& module = modules_[own ? c_.modules.size() + g
                                        : c_.groups[g].visible[slot].module];
    const uint32_t end = !own ? view.num_tokens
                         : view.num_tokens == 0
                             ? 0
                             : view.num_tokens - group.num_rows + row + 1;
    std::vector<double> turned = q;
    for (uint32_t i = 0; i < c_.rope_pairs; ++i) {
      const double angle = (position - view.position_offset) * frequencies_[i];
      const double cosine = std::cos(angle) * c_.rope_factor;
      const double sine = std::sin(angle) * c_.rope_factor;
      const uint32_t a = c_.rope_interleaved ? 2 * i : i;
      const uint32_t b = c_.rope_interleaved ? a + 1 : i + c_.rope_pairs;
      turned[a] = q[a] * cosine - q[b] * sine;
      turned[b] = q[b] * cosine + q[a] * sine;
    }
    for (uint32_t t = 0; t < end; ++t) {
      const size_t at = (size_t{kv_head} * view.num_tokens + t) * dim;
      double logit = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        logit += turned[d] * static_cast<double>(module.keys[at + d]);
      }
      logit /= std::sqrt(static_cast<double>(dim));
      const int32_t distance = view.position_offset + view.local_position +
                               static_cast<int32_t>(t) - position;
      if (c_.alibi) logit += static_cast<double>(slopes_[head]) * distance;
      if (c_.bias_reach >= 0) {
        const int32_t limited =
            std::clamp(distance, -c_.bias_reach, c_.bias_reach);
        logit += bias_[head * static_cast<size_t>(2 * c_.bias_reach + 1) +
                       static_cast<size_t>(limited + c_.bias_reach)];
      }
      seen.push_back({logit, &module.values[at]});
    }
  }
  if (c_.window > 0 && seen.size() > c_.window) {
    seen.erase(seen.begin(), seen.end() - static_cast<ptrdiff_t>(c_.window));
  }
  double maximum = -INFINITY;
  for (const Seen& s : seen) maximum = std::max(maximum, s.logit);
  double sum = 0;
  std::vector<double> out(dim);
  for (const Seen& s : seen) {
    const double weight = std::exp(s.logit - maximum);
    sum += weight;
    for (uint32_t d = 0; d < dim; ++d) {
      out[d] += weight * static_cast<double>(s.value[d]);
    }
  }
  for (double& value : out) value = sum > 0 ? value / sum : 0;
  return out;
}

void Runner::Compare(AttentionOutcome* outcome) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (uint32_t row = 0; row < groups_[g].num_rows; ++row) {
      for (uint32_t head = 0; head < c_.num_heads; ++head) {
        const std::vector<double> expected = Expected(g, row, head);
        const size_t at =
            ((size_t{groups_[g].first_row} + row) * c_.num_heads + head) *
            c_.head_dim;
        double error = 0;
        double norm = 0;
        for (uint32_t d = 0; d < c_.head_dim; ++d) {
          const double difference =
              FromBits(c_.type, out_[at + d]) - expected[d];
          error += difference * difference;
          norm += expected[d] * expected[d];
        }
        // Negated: NaN is a fault. Rows that see nothing are zeros exactly.
        const double relative =
            norm > 0 ? std::sqrt(error / norm) : (error == 0 ? 0 : INFINITY);
        if (!(relative <= outcome->worst_error)) {
          outcome->worst_error = relative;
        }
        if (!(relative <= ToleranceOf(c_.type)) && outcome->fault.empty()) {
          outcome->fault = "group " + std::to_string(g) + " row " +
                           std::to_string(row) + " head " +
                           std::to_string(head) + ": relative error " +
                           std::to_string(relative);
        }
      }
    }
  }
}

AttentionOutcome Runner::Run() {
  AttentionOutcome outcome;
  MakeModules();
  MakeGroups();
  MakeTables();
#ifndef __CUDACC__
  const emu::Counters before = emu::ReadCounters();
#endif
  if (const cudaError_t error = Launch(); error != cudaSuccess) {
    outcome.fault = cudaGetErrorName(error);
    return outcome;
  }
#ifndef __CUDACC__
  const emu::Counters after = emu::ReadCounters();
  if (after.matrix_loads > before.matrix_loads) {
    outcome.bank_conflicts =
        static_cast<double>(after.bank_conflicts - before.bank_conflicts) /
        static_cast<double>(after.matrix_loads - before.matrix_loads);
  }
#endif
  Compare(&outcome);
  outcome.out = out_;
  return outcome;
}

}  // namespace

double ToleranceOf(ElementType type) {
  return type == ElementType::kBf16 ? 1.5e-2 : 2e-3;
}

AttentionOutcome RunAttentionCase(const AttentionCase& attention_case) {
  return Runner(attention_case).Run();
}

}  // namespace promptcache::gpu
