#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "cuda/runtime/cuda_status.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/gpus.h"
#include "tests/support/status_matchers.h"

namespace promptcache::gpu {

// The first GPU, emulated or real, and a stream of it. Tests are skipped where
// there is none.
class KernelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const GpuSurvey survey = FindGpus();
    if (survey.gpus.empty()) GTEST_SKIP() << survey.ToString();
    device_ = *OpenGpu(survey, "");
    PC_ASSERT_OK(device_->MakeCurrent());
    stream_ = *device_->NewStream();
  }
  void TearDown() override { stream_.reset(); }

  template <typename T>
  T* Upload(std::span<const T> values) {
    auto buffer = device_->Allocate(std::max<size_t>(values.size_bytes(), 1));
    PC_EXPECT_OK(buffer);
    auto* data = reinterpret_cast<T*>(buffer->data());
    if (!values.empty()) {
      PC_EXPECT_OK(stream_->Copy(data, values.data(), values.size_bytes(),
                                 CopyKind::kToDevice));
      PC_EXPECT_OK(stream_->Synchronize());
    }
    buffers_.push_back(*std::move(buffer));
    return data;
  }
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    return Upload(std::span<const T>(values));
  }
  // Device memory that holds what it held before: NaNs, in the emulator.
  template <typename T>
  T* Room(size_t count) {
    auto buffer = device_->Allocate(std::max<size_t>(count * sizeof(T), 1));
    PC_EXPECT_OK(buffer);
    auto* data = reinterpret_cast<T*>(buffer->data());
    buffers_.push_back(*std::move(buffer));
    return data;
  }
  template <typename T>
  std::vector<T> Download(const T* data, size_t count) {
    std::vector<T> values(count);
    PC_EXPECT_OK(stream_->Copy(values.data(), data, count * sizeof(T),
                               CopyKind::kToHost));
    PC_EXPECT_OK(stream_->Synchronize());
    return values;
  }
  static absl::Status Launched(cudaError_t error) {
    return ToStatus(error, "launch");
  }

  std::vector<float> RandomFloats(size_t count, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_);
    return values;
  }

  std::mt19937 random_{7};
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<DeviceBuffer> buffers_;
};

}  // namespace promptcache::gpu
