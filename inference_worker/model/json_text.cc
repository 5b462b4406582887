#include "inference_worker/model/json_text.h"

#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "inference_worker/model/gguf.h"

namespace promptcache::worker {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 32;

// Looks only: what the parser itself lets pass and we do not.
class Checker final : public nlohmann::json_sax<json> {
 public:
  const std::string& error() const { return error_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override {
    keys_.emplace_back();
    return CheckDepth();
  }
  bool key(string_t& key) override {
    if (keys_.back().insert(key).second) return true;
    return Fail(absl::StrCat("key ", QuoteGgufName(key), " occurs twice"));
  }
  bool end_object() override { return keys_.pop_back(), true; }
  bool start_array(std::size_t) override {
    keys_.emplace_back();
    return CheckDepth();
  }
  bool end_array() override { return keys_.pop_back(), true; }
  bool parse_error(std::size_t position, const std::string&,
                   const json::exception&) override {
    return Fail(absl::StrCat("not JSON at byte ", position));
  }

 private:
  bool CheckDepth() {
    if (keys_.size() <= kMaxDepth) return true;
    return Fail(absl::StrCat("nested deeper than ", kMaxDepth));
  }
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }

  std::vector<std::set<std::string>> keys_;  // of each open value
  std::string error_;
};

}  // namespace

absl::StatusOr<json> ParseJsonObject(std::string_view text) {
  Checker checker;
  if (!json::sax_parse(text.begin(), text.end(), &checker)) {
    return absl::InvalidArgumentError(checker.error());
  }
  json value = json::parse(text.begin(), text.end(), /*cb=*/nullptr,
                           /*allow_exceptions=*/false);
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a JSON ", value.type_name(), ", not an object"));
  }
  return value;
}

std::string DescribeJson(const json& value) {
  if (value.is_string()) return QuoteGgufName(value.get<std::string>());
  if (value.is_object() || value.is_array()) {
    return absl::StrCat("an ", value.type_name(), " of ", value.size());
  }
  return value.dump();
}

}  // namespace promptcache::worker
