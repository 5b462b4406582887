#include "inference_worker/engine/cpu_weights.h"

#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace promptcache::worker {
namespace {

struct Part {
  TensorRole role;
  uint64_t num_rows;
};

class Loader {
 public:
  Loader(const ModelFile& file, cpu::Kernels& kernels,
         const std::function<void(double)>& progress)
      : file_(file),
        config_(file.config()),
        kernels_(kernels),
        progress_(progress),
        query_dim_(uint64_t{config_.num_heads} * config_.head_dim),
        kv_dim_(uint64_t{config_.num_kv_heads} * config_.head_dim) {}

  absl::StatusOr<CpuWeights> Load() {
    CountElements();
    Report();
    CpuWeights weights;
    const uint64_t vocab = config_.vocab_size;
    PC_ASSIGN_OR_RETURN(
        weights.embedding,
        Matrix(0, config_.hidden_dim, {{TensorRole::kTokenEmbedding, vocab}}));
    if (!config_.tied_embeddings) {
      PC_ASSIGN_OR_RETURN(
          weights.output,
          Matrix(0, config_.hidden_dim, {{TensorRole::kOutput, vocab}}));
    }
    PC_ASSIGN_OR_RETURN(weights.output_norm,
                        Vector(TensorRole::kOutputNorm, 0));
    for (uint32_t i = 0; i < config_.num_layers; ++i) {
      PC_ASSIGN_OR_RETURN(CpuLayerWeights layer, Layer(i));
      weights.layers.push_back(std::move(layer));
    }
    return weights;
  }

 private:
  absl::StatusOr<CpuLayerWeights> Layer(uint32_t i) {
    const uint64_t hidden = config_.hidden_dim;
    const uint64_t ffn = config_.ffn_dim;
    CpuLayerWeights layer;
    PC_ASSIGN_OR_RETURN(layer.attention_norm,
                        Vector(TensorRole::kAttentionNorm, i));
    PC_ASSIGN_OR_RETURN(layer.qkv, Matrix(i, hidden,
                                          {{TensorRole::kQuery, query_dim_},
                                           {TensorRole::kKey, kv_dim_},
                                           {TensorRole::kValue, kv_dim_}}));
    PC_ASSIGN_OR_RETURN(
        layer.attention_out,
        Matrix(i, query_dim_, {{TensorRole::kAttentionOut, hidden}}));
    PC_ASSIGN_OR_RETURN(layer.ffn_norm, Vector(TensorRole::kFfnNorm, i));
    PC_ASSIGN_OR_RETURN(layer.gate_up, Matrix(i, hidden,
                                              {{TensorRole::kFfnGate, ffn},
                                               {TensorRole::kFfnUp, ffn}}));
    PC_ASSIGN_OR_RETURN(layer.down,
                        Matrix(i, ffn, {{TensorRole::kFfnDown, hidden}}));
    return layer;
  }

  absl::StatusOr<TensorView> Tensor(TensorRole role, uint32_t layer,
                                    uint64_t rows, uint64_t cols) const {
    PC_ASSIGN_OR_RETURN(TensorView view, file_.Tensor(role, layer));
    if (view.rows != rows || view.cols != cols) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", view.name, " is [", view.rows, ", ",
                       view.cols, "], must be [", rows, ", ", cols, "]"));
    }
    return view;
  }

  absl::StatusOr<std::vector<float>> Vector(TensorRole role, uint32_t layer) {
    PC_ASSIGN_OR_RETURN(const TensorView view,
                        Tensor(role, layer, 1, config_.hidden_dim));
    std::vector<float> values(view.cols);
    DequantizeRow(view, 0, values);
    return values;
  }

  // The parts one below the other.
  absl::StatusOr<cpu::PackedMatrix> Matrix(uint32_t layer, uint64_t cols,
                                           std::initializer_list<Part> parts) {
    std::vector<TensorView> views;
    uint64_t num_rows = 0;
    for (const Part& part : parts) {
      PC_ASSIGN_OR_RETURN(TensorView view,
                          Tensor(part.role, layer, part.num_rows, cols));
      num_rows += view.rows;
      views.push_back(std::move(view));
    }
    PC_ASSIGN_OR_RETURN(
        cpu::PackedMatrix packed,
        kernels_.Pack(static_cast<uint32_t>(num_rows),
                      static_cast<uint32_t>(cols),
                      [&views](uint64_t row, std::span<float> out) {
                        size_t part = 0;
                        while (row >= views[part].rows) {
                          row -= views[part++].rows;
                        }
                        DequantizeRow(views[part], row, out);
                      }));
    done_elements_ += num_rows * cols;
    Report();
    return packed;
  }

  void CountElements() {
    const uint64_t hidden = config_.hidden_dim;
    const uint64_t layer =
        hidden * (2 * query_dim_ + 2 * kv_dim_ + uint64_t{3} * config_.ffn_dim);
    const uint64_t embeddings = config_.tied_embeddings ? 1 : 2;
    all_elements_ =
        config_.num_layers * layer + embeddings * config_.vocab_size * hidden;
  }

  void Report() const {
    if (!progress_) return;
    progress_(static_cast<double>(done_elements_) /
              static_cast<double>(all_elements_));
  }

  const ModelFile& file_;
  const ModelConfig& config_;
  cpu::Kernels& kernels_;
  const std::function<void(double)>& progress_;
  const uint64_t query_dim_;
  const uint64_t kv_dim_;
  uint64_t all_elements_ = 0;
  uint64_t done_elements_ = 0;
};

}  // namespace

absl::StatusOr<CpuWeights> LoadCpuWeights(
    const ModelFile& file, cpu::Kernels& kernels,
    const std::function<void(double)>& progress) {
  return Loader(file, kernels, progress).Load();
}

}  // namespace promptcache::worker
