// Attention alone: N new tokens after C cached ones in V modules of equal
// length, one layer; relocation off, on the queries, on the keys.

#include "cuda/kernels/attention.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/kv_layout.h"
#include "common/status_macros.h"
#include "cuda/kernels/attention_plan.h"
#include "cuda/runtime/cuda_status.h"
#include "inference_worker/cpu/rope_table.h"
#include "tools/bench/gpu/measure.h"

namespace promptcache::bench {
namespace {

constexpr uint32_t kHeadDim = 128;
constexpr uint32_t kHeads = 32;
constexpr int32_t kMaxPosition = 32767;

enum class Relocation { kOff, kQueries, kKeys };
const char* NameOf(Relocation relocation) {
  switch (relocation) {
    case Relocation::kOff:
      return "no relocation";
    case Relocation::kQueries:
      return "relocation on Q";
    case Relocation::kKeys:
      return "relocation on K";
  }
  return "";
}

struct Case {
  uint32_t num_new = 1;
  uint32_t num_cached = 0;
  uint32_t num_views = 1;
  uint32_t kv_heads = kHeads;
  Relocation relocation = Relocation::kQueries;
};

class Attention {
 public:
  Attention(gpu::Device& device, const Limits& limits, const Sizes& sizes)
      : device_(device), limits_(limits), sizes_(sizes) {}

  absl::Status Prepare() {
    PC_ASSIGN_OR_RETURN(stream_, device_.NewStream());
    PC_ASSIGN_OR_RETURN(
        const auto table,
        worker::cpu::RopeTable::Create(
            {.inv_freq =
                 worker::cpu::RopeTable::PlainFrequencies(10000, kHeadDim),
             .max_position = kMaxPosition}));
    const size_t num_bytes =
        (size_t{kMaxPosition} + 1) * kHeadDim * sizeof(float);
    PC_ASSIGN_OR_RETURN(rope_, device_.Allocate(num_bytes));
    PC_RETURN_IF_ERROR(stream_->Copy(rope_.data(), table.Cos(0), num_bytes,
                                     gpu::CopyKind::kToDevice));
    return stream_->Synchronize();
  }

  absl::StatusOr<Figure> Measure(const Case& c) {
    const KvLayout layout = {
        .num_layers = 1, .num_kv_heads = c.kv_heads, .head_dim = kHeadDim};
    PC_RETURN_IF_ERROR(MakePages(c, layout));
    PC_RETURN_IF_ERROR(MakePlan(c, layout));
    const uint32_t width = kHeads * kHeadDim;
    PC_ASSIGN_OR_RETURN(const auto q,
                        device_.Allocate(size_t{c.num_new} * width * 2));
    PC_ASSIGN_OR_RETURN(const auto out,
                        device_.Allocate(size_t{c.num_new} * width * 2));
    PC_RETURN_IF_ERROR(stream_->Zero(q.data(), q.num_bytes()));
    const gpu::AttentionParams params = {
        .head_dim = kHeadDim,
        .num_heads = kHeads,
        .num_kv_heads = c.kv_heads,
        .plan = plan_bytes_.data(),
        .grid = plan_.grid(),
        .states = reinterpret_cast<float*>(states_.data()),
        .q = q.data(),
        .q_stride = width,
        .out = out.data(),
        .out_stride = width,
        .key_offset_bytes = layout.key_offset_bytes(0),
        .value_offset_bytes = layout.value_offset_bytes(0),
        .head_stride_bytes = layout.head_stride_bytes(),
        .page_tokens = layout.page_tokens,
        .scale = 0.088f,
        .rope = c.relocation == Relocation::kOff
                    ? nullptr
                    : reinterpret_cast<const float*>(rope_.data()),
        .rope_pairs = kHeadDim / 2,
        .rotate_keys = c.relocation == Relocation::kKeys};
    PC_ASSIGN_OR_RETURN(
        const double ms,
        MillisecondsOf(device_, *stream_, sizes_.repetitions(), [&] {
          return gpu::ToStatus(gpu::LaunchAttention(params, stream_->native()),
                               "LaunchAttention");
        }));
    return Figure{"attention",
                  absl::StrCat(c.num_new, " new after ", c.num_cached, " in ",
                               c.num_views, " views, ", c.kv_heads,
                               " kv heads, ", NameOf(c.relocation)),
                  ms, "ms", Floor(c)};
  }

 private:
  // Every cached key and value once, or all products, whichever is longer.
  double Floor(const Case& c) const {
    const double tokens = static_cast<double>(c.num_cached + c.num_new);
    const double bytes = tokens * c.kv_heads * kHeadDim * 2 * 2;
    const double products =
        4.0 * c.num_new * (c.num_cached + c.num_new / 2.0) * kHeads * kHeadDim;
    return std::max(bytes / limits_.read_gb_per_s / 1e6,
                    products / limits_.tflop_per_s / 1e9);
  }

  absl::Status MakePages(const Case& c, const KvLayout& layout) {
    const uint64_t view_tokens = c.num_cached / c.num_views;
    const uint64_t of_view = layout.PagesFor(view_tokens);
    const uint64_t num_pages =
        of_view * c.num_views + layout.PagesFor(c.num_new);
    memory_.Reset();
    PC_ASSIGN_OR_RETURN(memory_,
                        device_.Allocate(num_pages * layout.page_bytes()));
    PC_RETURN_IF_ERROR(stream_->Zero(memory_.data(), memory_.num_bytes()));
    pages_.clear();
    for (uint64_t i = 0; i < num_pages; ++i) {
      pages_.push_back(memory_.data() + i * layout.page_bytes());
    }
    return absl::OkStatus();
  }

  absl::Status MakePlan(const Case& c, const KvLayout& layout) {
    const uint32_t view_tokens = c.num_cached / c.num_views;
    const uint64_t of_view = layout.PagesFor(view_tokens);
    std::vector<KvView> views;
    for (uint32_t v = 0; v < c.num_views; ++v) {
      views.push_back(
          {.pages = pages_.data() + v * of_view,
           .num_tokens = view_tokens,
           .position_offset = static_cast<int32_t>(v * view_tokens)});
    }
    const auto start = static_cast<int32_t>(c.num_views * view_tokens);
    const gpu::AttentionGroup group = {
        .num_rows = c.num_new,
        .position = start,
        .visible = views,
        .own = {.pages = pages_.data() + c.num_views * of_view,
                .num_tokens = c.num_new,
                .position_offset = start}};
    plan_.Build({.head_dim = kHeadDim,
                 .num_heads = kHeads,
                 .num_kv_heads = c.kv_heads,
                 .page_tokens = layout.page_tokens,
                 .num_multiprocessors =
                     static_cast<uint32_t>(device_.info().num_multiprocessors),
                 .rotate_keys = c.relocation == Relocation::kKeys},
                {&group, 1});
    plan_bytes_.Reset();
    states_.Reset();
    PC_ASSIGN_OR_RETURN(plan_bytes_, device_.Allocate(plan_.bytes().size()));
    PC_ASSIGN_OR_RETURN(
        states_, device_.Allocate(std::max<size_t>(plan_.StateBytes(), 16)));
    PC_RETURN_IF_ERROR(stream_->Copy(plan_bytes_.data(), plan_.bytes().data(),
                                     plan_.bytes().size(),
                                     gpu::CopyKind::kToDevice));
    return stream_->Synchronize();
  }

  gpu::Device& device_;
  const Limits limits_;
  const Sizes sizes_;
  std::unique_ptr<gpu::Stream> stream_;
  gpu::DeviceBuffer rope_;
  gpu::DeviceBuffer memory_;
  gpu::DeviceBuffer plan_bytes_;
  gpu::DeviceBuffer states_;
  gpu::AttentionPlan plan_;
  std::vector<const std::byte*> pages_;
};

std::vector<Case> Cases(const Sizes& sizes) {
  if (sizes.small) {
    return {{.num_new = 1, .num_cached = 64, .num_views = 2},
            {.num_new = 3,
             .num_cached = 32,
             .kv_heads = 8,
             .relocation = Relocation::kKeys}};
  }
  std::vector<Case> cases;
  for (const uint32_t kv_heads : {kHeads, kHeads / 4}) {
    for (const uint32_t num_cached : {3072u, 16384u}) {
      for (const uint32_t num_views : {1u, 10u, 100u}) {
        for (const uint32_t num_new : {1u, 16u, 100u}) {
          cases.push_back({num_new, num_cached, num_views, kv_heads});
        }
      }
    }
    for (const Relocation relocation :
         {Relocation::kOff, Relocation::kQueries, Relocation::kKeys}) {
      for (const uint32_t num_new : {1u, 100u}) {
        cases.push_back({num_new, 3072, 12, kv_heads, relocation});
      }
    }
  }
  return cases;
}

}  // namespace

absl::Status MeasureAttention(gpu::Device& device, const Limits& limits,
                              const Sizes& sizes,
                              std::vector<Figure>* figures) {
  Attention attention(device, limits, sizes);
  PC_RETURN_IF_ERROR(attention.Prepare());
  for (const Case& c : Cases(sizes)) {
    PC_ASSIGN_OR_RETURN(Figure figure, attention.Measure(c));
    figures->push_back(std::move(figure));
  }
  return absl::OkStatus();
}

}  // namespace promptcache::bench
