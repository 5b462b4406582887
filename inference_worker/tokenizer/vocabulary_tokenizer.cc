#include "inference_worker/tokenizer/vocabulary_tokenizer.h"

#include <algorithm>
#include <span>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/strings.h"

namespace promptcache::worker {
namespace {

constexpr uint64_t kDigestVersion = 1;

// Each with its length before it; one field, since hashing 100,000 small ones
// takes 5 ms of a start.
std::string Joined(const std::vector<std::string>& strings) {
  std::string joined;
  for (const std::string& s : strings) {
    const uint64_t num_bytes = s.size();
    joined.append(reinterpret_cast<const char*>(&num_bytes), sizeof(num_bytes));
    joined.append(s);
  }
  return joined;
}

Digest DigestOf(const VocabularyData& vocabulary) {
  const int32_t bos = vocabulary.add_bos ? vocabulary.bos_id : -1;
  Sha256 sha;
  sha.Add("tokenizer version", kDigestVersion)
      .Add("model", vocabulary.model)
      .Add("pre-tokenizer", vocabulary.pre_tokenizer)
      .Add("tokens", Joined(vocabulary.tokens))
      .Add("types", std::span<const int32_t>(vocabulary.token_types))
      .Add("merges", Joined(vocabulary.merges))
      .Add("bos", std::span<const int32_t>(&bos, 1));
  if (vocabulary.model != "gpt2") {
    const auto* scores =
        reinterpret_cast<const char*>(vocabulary.scores.data());
    sha.Add("scores",
            std::string_view(scores, vocabulary.scores.size() * sizeof(float)))
        .Add("space prefix", uint64_t{vocabulary.add_space_prefix});
  }
  if (vocabulary.model == "t5") {
    sha.Add("charsmap", vocabulary.charsmap)
        .Add("extra spaces", uint64_t{vocabulary.removes_extra_spaces});
  }
  return sha.Finish();
}

}  // namespace

absl::Status VocabularyTokenizer::ReadVocabulary(
    const VocabularyData& vocabulary,
    absl::FunctionRef<std::string(const std::string&, int32_t, TokenKind)>
        visit) {
  const size_t num_tokens = vocabulary.tokens.size();
  if (!vocabulary.token_types.empty() &&
      vocabulary.token_types.size() != num_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat(vocabulary.token_types.size(), " token types for ",
                     num_tokens, " tokens"));
  }
  decoded_.resize(num_tokens);
  for (size_t i = 0; i < num_tokens; ++i) {
    const std::string& token = vocabulary.tokens[i];
    const auto id = static_cast<int32_t>(i);
    const TokenKind kind = vocabulary.token_types.empty()
                               ? TokenKind::kNormal
                               : TokenKind{vocabulary.token_types[i]};
    switch (kind) {
      case TokenKind::kUnknown:
        if (unknown_id_ < 0) unknown_id_ = id;
        break;
      case TokenKind::kControl:
        control_tokens_.try_emplace(token, id);
        break;
      case TokenKind::kUserDefined:
      case TokenKind::kNormal:
      case TokenKind::kUnused:
      case TokenKind::kByte:
        if (!token.empty()) decoded_[i] = visit(token, id, kind);
        break;
      default:
        return absl::InvalidArgumentError(
            absl::StrCat("token ", id, " (\"", absl::CHexEscape(token),
                         "\"): unknown type ", static_cast<int32_t>(kind)));
    }
  }
  ReadStopIds(vocabulary);
  if (vocabulary.add_bos) bos_id_ = vocabulary.bos_id;
  text_end_id_ = vocabulary.text_end_id;
  digest_ = DigestOf(vocabulary);
  return absl::OkStatus();
}

absl::Status VocabularyTokenizer::ReadMerges(const VocabularyData& vocabulary,
                                             const IdsBySpelling& ids,
                                             BpeMerger* merger) {
  merger->Reserve(vocabulary.merges.size());
  std::string merged;
  for (size_t i = 0; i < vocabulary.merges.size(); ++i) {
    const std::string_view merge = vocabulary.merges[i];
    const size_t space = merge.find(' ', 1);
    const std::string_view left = merge.substr(0, space);
    const std::string_view right = space == std::string_view::npos
                                       ? std::string_view()
                                       : merge.substr(space + 1);
    merged.assign(left).append(right);
    const auto left_id = ids.find(ToAbsl(left));
    const auto right_id = ids.find(ToAbsl(right));
    const auto merged_id = ids.find(ToAbsl(merged));
    if (left_id == ids.end() || right_id == ids.end() ||
        merged_id == ids.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("merge ", i, " (\"", absl::CHexEscape(ToAbsl(merge)),
                       "\") is not of tokens into a token"));
    }
    merger->AddRule(left_id->second, right_id->second, static_cast<int32_t>(i),
                    merged_id->second);
  }
  return absl::OkStatus();
}

void VocabularyTokenizer::ReadStopIds(const VocabularyData& vocabulary) {
  std::vector<int32_t> ids = vocabulary.end_ids;
  ids.insert(ids.end(), {vocabulary.eos_id, vocabulary.eot_id});
  // What ends a turn in some chat template, whatever the file says.
  for (const char* name : {"<|im_end|>", "<|endoftext|>", "<|eot_id|>",
                           "<|eom_id|>", "<end_of_turn>", "<|end|>", "</s>"}) {
    ids.push_back(ControlToken(name));
  }
  for (const int32_t id : ids) {
    const bool known =
        std::find(stop_ids_.begin(), stop_ids_.end(), id) != stop_ids_.end();
    if (id >= 0 && !known) stop_ids_.push_back(id);
  }
}

std::string VocabularyTokenizer::Decode(int32_t id) const {
  return id < 0 || id >= vocab_size() ? "" : decoded(id);
}

int32_t VocabularyTokenizer::ControlToken(std::string_view text) const {
  const auto it = control_tokens_.find(ToAbsl(text));
  return it == control_tokens_.end() ? -1 : it->second;
}

int ByteOfToken(std::string_view token) {
  const auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
  };
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') {
    return -1;
  }
  const int high = digit(token[3]);
  const int low = digit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

}  // namespace promptcache::worker
