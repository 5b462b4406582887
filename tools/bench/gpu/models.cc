// Time to the first token and decoding on random weights: everything computed,
// modules cached on the device, modules copied from the host first.

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/engine/cuda_backend.h"
#include "inference_worker/engine/sampler.h"
#include "tools/bench/gpu/measure.h"
#include "tools/bench/gpu/random_model.h"

namespace promptcache::bench {
namespace {

using worker::Backend;
using worker::LogitsWanted;
using worker::RowGroup;

double Seconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class ModelBench {
 public:
  ModelBench(gpu::Device& device, const RandomModel& model,
             const Limits& limits, const Sizes& sizes)
      : device_(device),
        model_(model),
        limits_(limits),
        sizes_(sizes),
        num_cached_(sizes.small ? 48 : 3072),
        num_fresh_(sizes.small ? 5 : 100),
        num_decoded_(sizes.small ? 3 : 64) {}

  absl::Status Run(std::vector<Figure>* figures) {
    PC_ASSIGN_OR_RETURN(
        backend_, worker::CreateCudaBackend(model_, {.device = &device_}));
    PC_ASSIGN_OR_RETURN(stream_, device_.NewStream());
    PC_RETURN_IF_ERROR(MakePages());
    const double products =
        static_cast<double>(model_.WeightBytes());  // 2 a weight of 2 bytes
    const double read_ms =
        static_cast<double>(model_.WeightBytes()) / limits_.read_gb_per_s / 1e6;
    const double all_tokens = num_cached_ + num_fresh_;
    const double full_ms = products * all_tokens / limits_.tflop_per_s / 1e9;
    const double fresh_ms = products * num_fresh_ / limits_.tflop_per_s / 1e9;
    const double kv_bytes = static_cast<double>(module_bytes_);
    const double kv_ms = kv_bytes / limits_.read_gb_per_s / 1e6;
    const double copy_ms = kv_bytes / limits_.host_gb_per_s / 1e6;
    const double cached_ms = std::max(read_ms + kv_ms, fresh_ms);

    PC_RETURN_IF_ERROR(Add(figures, "full prefill", full_ms,
                           [this] { return FullPrefill(); }));
    PC_RETURN_IF_ERROR(EncodeModule());
    PC_RETURN_IF_ERROR(Add(figures, "cached on the device", cached_ms,
                           [this] { return Cached(); }));
    PC_RETURN_IF_ERROR(Add(figures, "cached in the host", cached_ms + copy_ms,
                           [this] { return CachedInHost(); }));
    for (const bool chosen : {true, false}) {
      PC_ASSIGN_OR_RETURN(const double step, DecodeStep(chosen));
      figures->push_back(
          {model_.config().name,
           absl::StrCat("decode step after ", num_cached_ + num_fresh_,
                        chosen ? "" : ", logits read back"),
           step, "ms", read_ms + kv_ms});
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Add(std::vector<Figure>* figures, const char* name,
                   double floor_ms, const std::function<absl::Status()>& run) {
    PC_RETURN_IF_ERROR(run());
    std::vector<double> all;
    for (int i = 0; i < sizes_.repetitions() / 2; ++i) {
      const double begin = Seconds();
      PC_RETURN_IF_ERROR(run());
      all.push_back((Seconds() - begin) * 1e3);
    }
    figures->push_back({model_.config().name,
                        absl::StrCat("time to first token, ", num_cached_,
                                     " + ", num_fresh_, ", ", name),
                        Median(std::move(all)), "ms", floor_ms});
    return absl::OkStatus();
  }

  absl::Status MakePages() {
    const KvLayout& layout = backend_->layout();
    const uint64_t module_pages = layout.PagesFor(num_cached_);
    const uint64_t tail_pages =
        layout.PagesFor(num_cached_ + num_fresh_ + num_decoded_ + 1);
    module_bytes_ = module_pages * layout.page_bytes();
    PC_ASSIGN_OR_RETURN(
        memory_,
        device_.Allocate(module_bytes_ + tail_pages * layout.page_bytes()));
    PC_ASSIGN_OR_RETURN(host_, device_.AllocatePinned(module_bytes_));
    for (uint64_t i = 0; i < module_pages + tail_pages; ++i) {
      (i < module_pages ? module_ : tail_)
          .push_back(memory_.data() + i * layout.page_bytes());
    }
    ids_.resize(num_cached_ + num_fresh_);
    for (size_t i = 0; i < ids_.size(); ++i) {
      ids_[i] = static_cast<int32_t>(i * 7919 % backend_->vocab_size());
    }
    return absl::OkStatus();
  }

  RowGroup Group(std::span<const int32_t> ids, std::vector<std::byte*>& pages,
                 int32_t start, uint32_t before,
                 std::span<const KvView> visible) {
    return {.tokens = ids,
            .position = start + static_cast<int32_t>(before),
            .visible = visible,
            .own = {.pages = pages.data(),
                    .num_tokens = before + static_cast<uint32_t>(ids.size()),
                    .position_offset = start},
            .own_write_pages = pages.data(),
            .logits = LogitsWanted::kLast};
  }
  // As a request is served: the token is chosen on the GPU; or with its logits.
  absl::Status Forward(RowGroup group, bool chosen = true) {
    if (chosen) group.choice = &choice_;
    return backend_->Forward({&group, 1}, &logits_);
  }
  // The module one position on: relocation is at work.
  KvView ModuleView() const {
    return {.pages = module_.data(),
            .num_tokens = num_cached_,
            .position_offset = 1};
  }
  std::span<const int32_t> Fresh() const {
    return std::span(ids_).last(num_fresh_);
  }

  absl::Status FullPrefill() { return Forward(Group(ids_, tail_, 0, 0, {})); }
  absl::Status EncodeModule() {
    PC_RETURN_IF_ERROR(
        Forward(Group(std::span(ids_).first(num_cached_), module_, 0, 0, {})));
    PC_RETURN_IF_ERROR(stream_->Copy(host_.data(), module_.front(),
                                     module_bytes_, gpu::CopyKind::kToHost));
    return stream_->Synchronize();
  }
  absl::Status Cached() {
    const KvView seen = ModuleView();
    return Forward(Group(Fresh(), tail_, static_cast<int32_t>(num_cached_) + 1,
                         0, {&seen, 1}));
  }
  absl::Status CachedInHost() {
    PC_RETURN_IF_ERROR(stream_->Copy(module_.front(), host_.data(),
                                     module_bytes_, gpu::CopyKind::kToDevice));
    PC_RETURN_IF_ERROR(stream_->Synchronize());
    return Cached();
  }
  // Milliseconds a token, the mean of many.
  absl::StatusOr<double> DecodeStep(bool chosen) {
    const KvView seen = ModuleView();
    double begin = 0;
    for (uint32_t i = 0; i <= num_decoded_; ++i) {
      // The first two are run and recorded.
      if (i == 2) begin = Seconds();
      const int32_t id = ids_[i];
      PC_RETURN_IF_ERROR(
          Forward(Group({&id, 1}, tail_, static_cast<int32_t>(num_cached_) + 1,
                        num_fresh_ + i, {&seen, 1}),
                  chosen));
    }
    return (Seconds() - begin) * 1e3 / (num_decoded_ - 1);
  }

  gpu::Device& device_;
  const RandomModel& model_;
  const Limits limits_;
  const Sizes sizes_;
  const uint32_t num_cached_;
  const uint32_t num_fresh_;
  const uint32_t num_decoded_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<gpu::Stream> stream_;
  gpu::DeviceBuffer memory_;
  gpu::PinnedBuffer host_;
  uint64_t module_bytes_ = 0;
  std::vector<std::byte*> module_;
  std::vector<std::byte*> tail_;
  std::vector<int32_t> ids_;
  worker::TokenChoice choice_;  // the best one
  std::vector<float> logits_;
};

}  // namespace

absl::Status MeasureModels(gpu::Device& device, const Limits& limits,
                           const Sizes& sizes, std::vector<Figure>* figures) {
  std::vector<RandomModel::Shape> shapes = {RandomModel::Llama2Of7B(),
                                            RandomModel::Llama3Of8B()};
  if (sizes.small) shapes = {RandomModel::Small()};
  for (const RandomModel::Shape& shape : shapes) {
    const RandomModel model(shape);
    PC_RETURN_IF_ERROR(ModelBench(device, model, limits, sizes).Run(figures));
  }
  return absl::OkStatus();
}

}  // namespace promptcache::bench
