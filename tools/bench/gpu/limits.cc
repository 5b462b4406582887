#include <algorithm>
#include <vector>

#include "common/status_macros.h"
#include "cuda/kernels/matmul.h"
#include "tools/bench/gpu/measure.h"

namespace promptcache::bench {

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

absl::StatusOr<double> MillisecondsOf(
    gpu::Device& device, gpu::Stream& stream, int repetitions,
    const std::function<absl::Status()>& queue) {
  PC_ASSIGN_OR_RETURN(const auto begin, device.NewEvent(/*timing=*/true));
  PC_ASSIGN_OR_RETURN(const auto end, device.NewEvent(/*timing=*/true));
  PC_RETURN_IF_ERROR(queue());
  std::vector<double> all;
  for (int i = 0; i < repetitions; ++i) {
    PC_RETURN_IF_ERROR(stream.Record(begin.get()));
    PC_RETURN_IF_ERROR(queue());
    PC_RETURN_IF_ERROR(stream.Record(end.get()));
    PC_RETURN_IF_ERROR(stream.Synchronize());
    PC_ASSIGN_OR_RETURN(const float ms, end->MillisecondsSince(*begin));
    all.push_back(ms);
  }
  return Median(std::move(all));
}

namespace {

absl::StatusOr<double> ReadRate(gpu::Device& device, gpu::Stream& stream,
                                const Sizes& sizes) {
  const size_t num_bytes = sizes.small ? size_t{1} << 16 : size_t{2} << 30;
  PC_ASSIGN_OR_RETURN(const auto from, device.Allocate(num_bytes));
  PC_ASSIGN_OR_RETURN(const auto to, device.Allocate(num_bytes));
  PC_RETURN_IF_ERROR(stream.Zero(from.data(), num_bytes));
  PC_ASSIGN_OR_RETURN(const double ms,
                      MillisecondsOf(device, stream, sizes.repetitions(), [&] {
                        return stream.Copy(to.data(), from.data(), num_bytes,
                                           gpu::CopyKind::kOnDevice);
                      }));
  // Read once and written once.
  return 2.0 * static_cast<double>(num_bytes) / ms / 1e6;
}

absl::StatusOr<double> HostRate(gpu::Device& device, gpu::Stream& stream,
                                const Sizes& sizes) {
  const size_t num_bytes = sizes.small ? size_t{1} << 16 : size_t{512} << 20;
  PC_ASSIGN_OR_RETURN(const auto from, device.AllocatePinned(num_bytes));
  PC_ASSIGN_OR_RETURN(const auto to, device.Allocate(num_bytes));
  PC_ASSIGN_OR_RETURN(const double ms,
                      MillisecondsOf(device, stream, sizes.repetitions(), [&] {
                        return stream.Copy(to.data(), from.data(), num_bytes,
                                           gpu::CopyKind::kToDevice);
                      }));
  return static_cast<double>(num_bytes) / ms / 1e6;
}

absl::StatusOr<double> ProductRate(gpu::Device& device, gpu::Stream& stream,
                                   const Sizes& sizes) {
  const int32_t side = sizes.small ? 64 : 8192;
  const size_t elements = static_cast<size_t>(side) * static_cast<size_t>(side);
  PC_ASSIGN_OR_RETURN(const auto matmul, gpu::Matmul::Create(device, {}));
  PC_ASSIGN_OR_RETURN(const auto x, device.Allocate(elements * 2));
  PC_ASSIGN_OR_RETURN(const auto w, device.Allocate(elements * 2));
  PC_ASSIGN_OR_RETURN(const auto y, device.Allocate(elements * 4));
  PC_RETURN_IF_ERROR(stream.Zero(x.data(), elements * 2));
  PC_RETURN_IF_ERROR(stream.Zero(w.data(), elements * 2));
  PC_ASSIGN_OR_RETURN(
      const double ms, MillisecondsOf(device, stream, sizes.repetitions(), [&] {
        return matmul->Run(
            {.x = reinterpret_cast<const uint16_t*>(x.data()),
             .weights = reinterpret_cast<const uint16_t*>(w.data()),
             .y = reinterpret_cast<float*>(y.data()),
             .num_rows = side,
             .num_cols = side,
             .depth = side},
            stream.native());
      }));
  return 2.0 * static_cast<double>(elements) * side / ms / 1e9;
}

}  // namespace

absl::StatusOr<Limits> MeasureLimits(gpu::Device& device, const Sizes& sizes,
                                     std::vector<Figure>* figures) {
  PC_ASSIGN_OR_RETURN(const auto stream, device.NewStream());
  Limits limits;
  PC_ASSIGN_OR_RETURN(limits.read_gb_per_s, ReadRate(device, *stream, sizes));
  PC_ASSIGN_OR_RETURN(limits.host_gb_per_s, HostRate(device, *stream, sizes));
  PC_ASSIGN_OR_RETURN(limits.tflop_per_s, ProductRate(device, *stream, sizes));
  figures->push_back(
      {"limits", "device memory, copy", limits.read_gb_per_s, "GB/s"});
  figures->push_back(
      {"limits", "host to device, pinned", limits.host_gb_per_s, "GB/s"});
  figures->push_back({"limits", "bf16 product", limits.tflop_per_s, "TFLOP/s"});
  return limits;
}

}  // namespace promptcache::bench
