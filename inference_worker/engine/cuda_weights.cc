#include "inference_worker/engine/cuda_weights.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "common/float_types.h"
#include "common/status_macros.h"
#include "inference_worker/engine/weight_loader_inl.h"

namespace promptcache::worker {
namespace {

constexpr size_t kStagingBytes = size_t{32} << 20;
// Of a vector in the block that holds all of them, in floats.
constexpr size_t kVectorAlignment = 64;

// Rows as bf16 in pinned memory, copied when it is full.
class MatrixUpload {
 public:
  static absl::StatusOr<std::unique_ptr<MatrixUpload>> Create(
      gpu::Device& device) {
    std::unique_ptr<MatrixUpload> upload(new MatrixUpload(device));
    PC_ASSIGN_OR_RETURN(upload->stream_, device.NewStream());
    PC_ASSIGN_OR_RETURN(upload->staging_, device.AllocatePinned(kStagingBytes));
    return upload;
  }

  // The parts one below the other.
  absl::StatusOr<CudaMatrix> Make(std::span<const TensorView> parts,
                                  std::vector<gpu::DeviceBuffer>& memory) {
    const uint64_t cols = parts.front().cols;
    uint64_t rows = 0;
    for (const TensorView& part : parts) rows += part.rows;
    PC_ASSIGN_OR_RETURN(gpu::DeviceBuffer buffer,
                        device_.Allocate(rows * cols * sizeof(uint16_t)));
    to_ = buffer.data();
    values_.resize(cols);
    for (const TensorView& part : parts) {
      for (uint64_t row = 0; row < part.rows; ++row) {
        PC_RETURN_IF_ERROR(AddRow(part, row));
      }
    }
    PC_RETURN_IF_ERROR(Flush());
    const auto* data = reinterpret_cast<const uint16_t*>(buffer.data());
    memory.push_back(std::move(buffer));
    return CudaMatrix(data, static_cast<uint32_t>(rows),
                      static_cast<uint32_t>(cols));
  }

 private:
  explicit MatrixUpload(gpu::Device& device) : device_(device) {}

  absl::Status AddRow(const TensorView& part, uint64_t row) {
    const size_t row_bytes = part.cols * sizeof(uint16_t);
    // A row longer than the staging memory is copied in pieces.
    const bool as_it_is = part.type == TensorType::kBf16 && part.run == 0 &&
                          part.column_stride == 0;
    const std::byte* bits = nullptr;
    if (as_it_is) {
      bits = part.data.data() + row * row_bytes;
    } else {
      DequantizeRow(part, row, values_);
      rounded_.resize(part.cols);
      std::ranges::transform(values_, rounded_.begin(), FloatToBf16);
      bits = reinterpret_cast<const std::byte*>(rounded_.data());
    }
    for (size_t done = 0; done < row_bytes;) {
      if (filled_ == kStagingBytes) PC_RETURN_IF_ERROR(Flush());
      const size_t count = std::min(row_bytes - done, kStagingBytes - filled_);
      std::memcpy(staging_.data() + filled_, bits + done, count);
      filled_ += count;
      done += count;
    }
    return absl::OkStatus();
  }

  absl::Status Flush() {
    if (filled_ == 0) return absl::OkStatus();
    PC_RETURN_IF_ERROR(
        stream_->Copy(to_, staging_.data(), filled_, gpu::CopyKind::kToDevice));
    PC_RETURN_IF_ERROR(stream_->Synchronize());
    to_ += filled_;
    filled_ = 0;
    return absl::OkStatus();
  }

  gpu::Device& device_;
  std::unique_ptr<gpu::Stream> stream_;
  gpu::PinnedBuffer staging_;
  size_t filled_ = 0;
  std::byte* to_ = nullptr;
  std::vector<float> values_;
  std::vector<uint16_t> rounded_;
};

// All norms and biases in one block of device memory.
class VectorUpload {
 public:
  // `*pointer` is set by Finish, unless there are no values.
  void Add(const std::vector<float>& values, const float** pointer) {
    if (values.empty()) return;
    places_.emplace_back(pointer, all_.size());
    all_.insert(all_.end(), values.begin(), values.end());
    all_.resize((all_.size() + kVectorAlignment - 1) / kVectorAlignment *
                kVectorAlignment);
  }
  void Add(const NormWeights& norm, CudaNorm* to) {
    Add(norm.weight, &to->weight);
    Add(norm.bias, &to->bias);
  }
  void Add(const Projection<CudaMatrix>& projection, CudaProjection* to) {
    to->weights = projection.weights;
    Add(projection.bias, &to->bias);
  }
  void Add(const LayerWeights<CudaMatrix>& layer, CudaLayer* to) {
    Add(layer.attention_norm, &to->attention_norm);
    Add(layer.qkv, &to->qkv);
    Add(layer.query_norm, &to->query_norm);
    Add(layer.key_norm, &to->key_norm);
    Add(layer.attention_out, &to->attention_out);
    Add(layer.post_attention_norm, &to->post_attention_norm);
    Add(layer.ffn_norm, &to->ffn_norm);
    Add(layer.gate_up, &to->gate_up);
    Add(layer.down, &to->down);
    Add(layer.post_ffn_norm, &to->post_ffn_norm);
  }

  absl::Status Finish(gpu::Device& device,
                      std::vector<gpu::DeviceBuffer>& memory) {
    if (all_.empty()) return absl::OkStatus();
    const size_t num_bytes = all_.size() * sizeof(float);
    PC_ASSIGN_OR_RETURN(gpu::DeviceBuffer buffer, device.Allocate(num_bytes));
    PC_ASSIGN_OR_RETURN(const std::unique_ptr<gpu::Stream> stream,
                        device.NewStream());
    PC_RETURN_IF_ERROR(stream->Copy(buffer.data(), all_.data(), num_bytes,
                                    gpu::CopyKind::kToDevice));
    PC_RETURN_IF_ERROR(stream->Synchronize());
    const auto* base = reinterpret_cast<const float*>(buffer.data());
    for (const auto& [pointer, offset] : places_) *pointer = base + offset;
    memory.push_back(std::move(buffer));
    return absl::OkStatus();
  }

 private:
  std::vector<float> all_;
  std::vector<std::pair<const float**, size_t>> places_;
};

}  // namespace

absl::StatusOr<CudaWeights> LoadCudaWeights(
    const ModelFile& file, gpu::Device& device,
    const std::function<void(double)>& progress) {
  PC_ASSIGN_OR_RETURN(const std::unique_ptr<MatrixUpload> matrices,
                      MatrixUpload::Create(device));
  CudaWeights out;
  const WeightLoader<CudaMatrix>::MakeMatrix make =
      [&](std::span<const TensorView> parts) {
        return matrices->Make(parts, out.memory);
      };
  PC_ASSIGN_OR_RETURN(ModelWeights<CudaMatrix> weights,
                      WeightLoader<CudaMatrix>(file, make, progress).Load());
  VectorUpload vectors;
  out.embedding = weights.embedding;
  out.positions = weights.positions;
  out.head = weights.head();
  vectors.Add(weights.output_bias, &out.output_bias);
  vectors.Add(weights.output_norm, &out.output_norm);
  // Never resized again: the upload keeps addresses.
  out.layers.resize(weights.layers.size());
  for (size_t i = 0; i < out.layers.size(); ++i) {
    vectors.Add(weights.layers[i], &out.layers[i]);
  }
  const EncoderWeights<CudaMatrix>& encoder = weights.encoder;
  out.encoder_layers.resize(encoder.layers.size());
  for (size_t i = 0; i < encoder.layers.size(); ++i) {
    vectors.Add(encoder.layers[i], &out.encoder_layers[i]);
  }
  vectors.Add(encoder.output_norm, &out.encoder_output_norm);
  out.cross.resize(encoder.cross.size());
  for (size_t i = 0; i < encoder.cross.size(); ++i) {
    const CrossWeights<CudaMatrix>& cross = encoder.cross[i];
    vectors.Add(cross.norm, &out.cross[i].norm);
    out.cross[i].query = cross.query.weights;
    out.cross[i].key_value = cross.key_value.weights;
    out.cross[i].out = cross.out.weights;
  }
  out.encoder_relative_bias = encoder.relative_bias;
  out.decoder_relative_bias = encoder.decoder_relative_bias;
  PC_RETURN_IF_ERROR(vectors.Finish(device, out.memory));
  return out;
}

}  // namespace promptcache::worker
