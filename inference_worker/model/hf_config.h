#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// Typed access to a folder's config.json, or to an object in it. A key that is
// null is as good as absent. Errors name the key, with its path, and the value.
// A view: the JSON must outlive it.
class HfConfig {
 public:
  explicit HfConfig(const nlohmann::json& object, std::string path = "")
      : object_(object), path_(std::move(path)) {}

  bool Has(std::string_view key) const { return Find(key) != nullptr; }
  // Null when absent or null.
  const nlohmann::json* Find(std::string_view key) const;
  // An object in this one. REQUIRES: it is one.
  HfConfig Inside(std::string_view key) const;

  // From 1 to `max`.
  absl::StatusOr<uint32_t> Dimension(
      std::string_view key, uint32_t max,
      std::optional<uint32_t> fallback = {}) const;
  absl::StatusOr<float> PositiveFloat(std::string_view key,
                                      std::optional<float> fallback = {}) const;
  absl::StatusOr<bool> Bool(std::string_view key, bool fallback) const;
  absl::StatusOr<std::string> String(
      std::string_view key, std::optional<std::string> fallback = {}) const;

  // That a key is absent or has this value: others are not supported.
  absl::Status RequireBool(std::string_view key, bool value) const;
  absl::Status RequireAbsent(
      std::initializer_list<std::string_view> keys) const;
  absl::Status Unsupported(std::string_view key, std::string_view why) const;

 private:
  std::string Name(std::string_view key) const;
  absl::Status Missing(std::string_view key) const;
  absl::Status Wrong(std::string_view key, std::string_view wanted) const;

  const nlohmann::json& object_;
  const std::string path_;
};

// Of the 4.x keys (rope_theta, rope_scaling) or the 5.x one (rope_parameters).
// `partial`: the part of a head that is rotated when partial_rotary_factor does
// not say. REQUIRES: head_dim and context_length are set.
absl::Status ReadHfRope(const HfConfig& file, float default_theta,
                        float partial, ModelConfig* config);
// The same of one object in the form of rope_parameters.
absl::Status ReadHfRopeObject(const HfConfig& file, const HfConfig& object,
                              float partial, ModelConfig* config);

absl::StatusOr<Activation> ReadHfActivation(const HfConfig& file,
                                            std::string_view key,
                                            std::string_view fallback);

// Windows of the layers from layer_types or, without it, `is_local`. Nothing
// when `window` is 0.
absl::Status ReadHfWindows(const HfConfig& file, uint32_t window,
                           bool (*is_local)(uint32_t layer, uint32_t argument),
                           uint32_t argument, ModelConfig* config);

}  // namespace promptcache::worker
