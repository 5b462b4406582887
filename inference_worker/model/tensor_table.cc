#include "inference_worker/model/tensor_table.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "glog/logging.h"
#include "inference_worker/model/gguf.h"
#include "inference_worker/model/tensor_types.h"

namespace promptcache::worker {
namespace {

constexpr std::string_view kLayer = "{}";

absl::Status CheckNoOverlap(const std::map<std::string, TensorView>& tensors) {
  std::vector<const TensorView*> by_address;
  by_address.reserve(tensors.size());
  for (const auto& [name, view] : tensors) by_address.push_back(&view);
  std::sort(by_address.begin(), by_address.end(),
            [](const TensorView* a, const TensorView* b) {
              return a->data.data() < b->data.data();
            });
  for (size_t i = 1; i < by_address.size(); ++i) {
    const TensorView& before = *by_address[i - 1];
    const TensorView& after = *by_address[i];
    if (before.data.data() + before.data.size() > after.data.data()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", QuoteGgufName(after.name), ": its data overlaps that of ",
          QuoteGgufName(before.name)));
    }
  }
  return absl::OkStatus();
}

// The part of `whole`, which has the rule's shape, or its transpose.
absl::StatusOr<TensorView> Cut(const TensorRule& rule,
                               const TensorView& whole) {
  const TensorTypeInfo& info = InfoOf(whole.type);
  const TensorPart& part = rule.part;
  const bool is_vector = rule.shape.rows == 1;
  const uint64_t available = is_vector ? rule.shape.cols : rule.shape.rows;
  const uint64_t count = part.count == 0 ? available : part.count;
  const bool by_element = is_vector || rule.transposed;
  if (by_element && info.block_elements != 1 &&
      (rule.transposed || count != available)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", QuoteGgufName(whole.name), ": type ", info.name,
                     " cannot be taken apart by elements"));
  }
  const uint64_t run = part.run < count ? part.run : 0;
  const uint64_t last =
      run == 0 ? count - 1
               : (count - 1) / run * part.run_stride + (count - 1) % run;
  CHECK_LT(part.first + last, available) << whole.name;

  TensorView view = whole;
  view.rows = is_vector ? 1 : count;
  view.cols = is_vector ? count : rule.shape.cols;
  view.run = run;
  view.run_stride = run == 0 ? 0 : part.run_stride;
  view.column_stride = rule.transposed ? rule.shape.rows : 0;
  const uint64_t unit_bytes =
      by_element ? info.block_bytes
                 : rule.shape.cols / info.block_elements * info.block_bytes;
  if (count != available) {
    view.data = whole.data.subspan(part.first * unit_bytes);
    if (!rule.transposed) view.data = view.data.first((last + 1) * unit_bytes);
  }
  return view;
}

// How many of the names' first characters the file leaves out.
size_t OmittedPrefix(const ModelLayout& layout,
                     const std::set<std::string_view>& names) {
  const std::string& prefix = layout.optional_prefix;
  if (prefix.empty()) return 0;
  const bool has_prefix = std::any_of(
      names.begin(), names.end(),
      [&](std::string_view name) { return name.starts_with(prefix); });
  return has_prefix ? 0 : prefix.size();
}

bool IsIgnored(const ModelLayout& layout, std::string_view name) {
  return std::any_of(
      layout.ignored_endings.begin(), layout.ignored_endings.end(),
      [name](const std::string& ending) { return name.ends_with(ending); });
}

}  // namespace

bool IsPerLayer(std::string_view pattern) {
  return pattern.find(kLayer) != std::string_view::npos;
}

std::string TensorName(std::string_view pattern, uint32_t layer) {
  const size_t at = pattern.find(kLayer);
  if (at == std::string_view::npos) return std::string(pattern);
  return absl::StrCat(ToAbsl(pattern.substr(0, at)), layer,
                      ToAbsl(pattern.substr(at + kLayer.size())));
}

absl::StatusOr<TensorTable> TensorTable::Build(const ModelLayout& layout,
                                               const TensorSource& source) {
  TensorTable table;
  const std::vector<std::string_view> all = source.Names();
  const std::set<std::string_view> names(all.begin(), all.end());
  std::set<std::string_view> left = names;
  const size_t omitted = OmittedPrefix(layout, names);
  for (const TensorRule& rule : layout.tensors) {
    const bool prefixed = rule.name.starts_with(layout.optional_prefix);
    const std::string pattern = rule.name.substr(prefixed ? omitted : 0);
    table.names_.emplace(rule.role, pattern);
    const uint32_t layers = IsEncoderRole(rule.role)
                                ? layout.config.encoder_layers
                                : layout.config.num_layers;
    const uint32_t count = IsPerLayer(pattern) ? layers : 1;
    for (uint32_t layer = 0; layer < count; ++layer) {
      std::string name = TensorName(pattern, layer);
      if (!names.contains(name)) {
        if (rule.optional) continue;
        return absl::InvalidArgumentError(
            absl::StrCat("tensor ", QuoteGgufName(name), " is missing"));
      }
      left.erase(name);
      PC_RETURN_IF_ERROR(table.Add(rule, layer, std::move(name), source));
    }
  }
  // A bias, a scale, a table of frequencies, more layers than stated: computing
  // without it would be wrong.
  for (const std::string_view name : left) {
    if (IsIgnored(layout, name)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", QuoteGgufName(name), " is not one of a ",
                     layout.config.num_layers, "-layer ",
                     layout.config.architecture, " model"));
  }
  PC_RETURN_IF_ERROR(CheckNoOverlap(table.whole_));
  return table;
}

absl::Status TensorTable::Add(const TensorRule& rule, uint32_t layer,
                              std::string name, const TensorSource& source) {
  const TensorShape in_file =
      rule.transposed ? TensorShape{rule.shape.cols, rule.shape.rows}
                      : rule.shape;
  auto it = whole_.find(name);
  if (it == whole_.end()) {
    PC_ASSIGN_OR_RETURN(TensorView whole, source.Locate(name, in_file));
    it = whole_.emplace(std::move(name), std::move(whole)).first;
  }
  PC_ASSIGN_OR_RETURN(TensorView view, Cut(rule, it->second));
  by_role_.emplace(std::pair(rule.role, layer), std::move(view));
  return absl::OkStatus();
}

absl::StatusOr<TensorView> TensorTable::Find(TensorRole role,
                                             uint32_t layer) const {
  const auto name = names_.find(role);
  if (name == names_.end()) {
    return absl::NotFoundError(
        absl::StrCat("no tensor has role ", static_cast<int>(role)));
  }
  if (!IsPerLayer(name->second)) layer = 0;
  const auto it = by_role_.find(std::pair(role, layer));
  if (it == by_role_.end()) {
    return absl::NotFoundError(absl::StrCat(
        "no tensor ", QuoteGgufName(TensorName(name->second, layer))));
  }
  return it->second;
}

}  // namespace promptcache::worker
