#include "inference_worker/engine/cuda_head.h"

#include <algorithm>
#include <bit>

#include "common/status_macros.h"
#include "cuda/runtime/cuda_status.h"

namespace promptcache::worker {

CudaHead::CudaHead(CudaLayers& layers, const CudaWeights& weights,
                   uint32_t vocab_size)
    : layers_(layers),
      weights_(weights),
      vocab_(static_cast<int32_t>(vocab_size)),
      readback_(layers.device()) {}

void CudaHead::Clear() {
  rows_.clear();
  choice_rows_.clear();
  choices_.clear();
  sampling_rows_.clear();
  penalized_.clear();
}

void CudaHead::Add(int32_t row, TokenChoice* choice) {
  if (choice == nullptr) {
    rows_.push_back(row);
    return;
  }
  choice_rows_.push_back(row);
  choices_.push_back(choice);
  const SamplingOptions& options = choice->options;
  sampling_rows_.push_back(
      {.temperature = options.temperature,
       .top_k = options.top_k,
       .top_p = options.top_p,
       .min_p = options.min_p,
       .repetition_penalty = options.repetition_penalty,
       .first_penalized = static_cast<int32_t>(penalized_.size()),
       .num_penalized = static_cast<int32_t>(choice->penalized.size()),
       .uniform = choice->uniform});
  penalized_.insert(penalized_.end(), choice->penalized.begin(),
                    choice->penalized.end());
}

void CudaHead::AddTo(PassInput& input) {
  std::vector<int32_t> rows = rows_;
  rows.insert(rows.end(), choice_rows_.begin(), choice_rows_.end());
  rows_at_ = input.Add(rows);
  sampling_rows_at_ = input.Add(sampling_rows_);
  // Histories grow: a few sizes, so that a few graphs serve them.
  penalized_at_ = input.Add(
      penalized_, penalized_.empty() ? 0 : std::bit_ceil(penalized_.size()));
}

absl::StatusOr<bool> CudaHead::Reserve() {
  const size_t needed = choices_.size() * sizeof(int32_t);
  if (needed <= chosen_.num_bytes()) return false;
  chosen_.Reset();
  PC_ASSIGN_OR_RETURN(chosen_,
                      layers_.device().Allocate(std::bit_ceil(needed)));
  return true;
}

absl::Status CudaHead::RunBlock(const PassInput& input, int32_t first,
                                int32_t num_rows) {
  if (num_rows == 0) return absl::OkStatus();
  PC_RETURN_IF_ERROR(layers_.Normalize(weights_.output_norm, num_rows,
                                       input.At<int32_t>(rows_at_) + first));
  PC_RETURN_IF_ERROR(layers_.ProjectToVocabulary(weights_, num_rows));
  const int32_t begin = std::max(first, num_returned());
  const int32_t num_choices = first + num_rows - begin;
  if (num_choices <= 0) return absl::OkStatus();
  const int32_t first_choice = begin - num_returned();
  return gpu::ToStatus(
      gpu::LaunchSampling(
          {.logits = layers_.act().logits +
                     static_cast<int64_t>(begin - first) * vocab_,
           .rows = input.At<gpu::SamplingRow>(sampling_rows_at_) + first_choice,
           .penalized = input.At<int32_t>(penalized_at_),
           .chosen = reinterpret_cast<int32_t*>(chosen_.data()) + first_choice,
           .num_rows = num_choices,
           .vocab = vocab_},
          layers_.stream().native()),
      "LaunchSampling");
}

absl::Status CudaHead::Read(float* logits) {
  if (num_rows() == 0) return layers_.stream().Synchronize();
  return ReadBlock(0, num_rows(), logits);
}

absl::Status CudaHead::ReadBlock(int32_t first, int32_t num_rows,
                                 float* logits) {
  const int32_t end = first + num_rows;
  const int32_t returned = std::min(end, num_returned()) - first;
  if (returned > 0) {
    PC_RETURN_IF_ERROR(readback_.Read(
        layers_.act().logits,
        static_cast<size_t>(returned) * static_cast<size_t>(vocab_),
        layers_.stream(), logits));
  }
  const int32_t begin = std::max(first, num_returned()) - num_returned();
  if (end <= num_returned()) return absl::OkStatus();
  tokens_.resize(static_cast<size_t>(end - num_returned() - begin));
  PC_RETURN_IF_ERROR(
      readback_.Read(reinterpret_cast<const int32_t*>(chosen_.data()) + begin,
                     tokens_.size(), layers_.stream(), tokens_.data()));
  for (size_t i = 0; i < tokens_.size(); ++i) {
    choices_[static_cast<size_t>(begin) + i]->token = tokens_[i];
  }
  return absl::OkStatus();
}

absl::Status CudaHead::RunAndRead(const PassInput& input, float* logits) {
  const int32_t block = CudaLayers::kLogitRows;
  for (int32_t first = 0; first < num_rows(); first += block) {
    const int32_t rows = std::min(block, num_rows() - first);
    PC_RETURN_IF_ERROR(RunBlock(input, first, rows));
    PC_RETURN_IF_ERROR(ReadBlock(
        first, rows,
        logits +
            static_cast<int64_t>(std::min(first, num_returned())) * vocab_));
  }
  return num_rows() > 0 ? absl::OkStatus() : layers_.stream().Synchronize();
}

}  // namespace promptcache::worker
