#include "inference_worker/tokenizer/tokenizer_json.h"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/tokenizer/pre_tokenizer.h"
#include "inference_worker/tokenizer/tokenizer_json_parts.h"
#include "inference_worker/tokenizer/vocabulary_tokenizer.h"
#include "nlohmann/json.hpp"

namespace promptcache::worker {
namespace {

// Far above any vocabulary: what a damaged id may at most make us allocate.
constexpr uint64_t kMaxTokens = uint64_t{1} << 22;

// The parts of a Sequence, which may be nested; or the one part; or nothing.
absl::Status Flatten(std::string_view key, const char* list, const Json& json,
                     std::vector<const Json*>* parts, int depth = 0) {
  if (json.is_null()) return absl::OkStatus();
  if (TypeOf(json) != "Sequence") {
    parts->push_back(&json);
    return absl::OkStatus();
  }
  const Json& inner = Field(json, list);
  if (!inner.is_array() || depth > 4) return Refuse(key, json);
  for (const Json& part : inner) {
    PC_RETURN_IF_ERROR(Flatten(key, list, part, parts, depth + 1));
  }
  return absl::OkStatus();
}

// Reads one tokenizer.json, part by part.
class Reader {
 public:
  Reader(const Json& root, const Json& config)
      : root_(root), config_(config), model_(Field(root, "model")) {}

  absl::StatusOr<VocabularyData> Read();

 private:
  absl::Status ReadModel();
  absl::Status ReadVocabulary();
  absl::Status ReadMerges();
  absl::Status ReadAddedTokens();
  absl::Status SetToken(const std::string& token, const Json& id,
                        TokenKind kind);
  absl::Status ReadByteLevel();
  absl::Status ReadPreTokenizer(const Json& part, bool* spelled,
                                std::vector<std::string>* steps);
  absl::Status ReadSentencePiece();
  absl::Status ReadMetaspace(const Json& part);
  absl::Status ReadUnigram();
  absl::Status ReadPieces();
  absl::Status CheckDecoder(std::initializer_list<std::string_view> known);
  void ReadEnds();
  int32_t IdOf(const Json& name) const;

  const Json& root_;
  const Json& config_;
  const Json& model_;
  std::vector<const Json*> normalizers_;
  std::vector<const Json*> pre_tokenizers_;
  std::string unknown_;  // the unknown token, where there is one
  VocabularyData out_;
};

absl::StatusOr<VocabularyData> Reader::Read() {
  PC_RETURN_IF_ERROR(ReadModel());
  PC_RETURN_IF_ERROR(Flatten("normalizer", "normalizers",
                             Field(root_, "normalizer"), &normalizers_));
  PC_RETURN_IF_ERROR(Flatten("pre_tokenizer", "pretokenizers",
                             Field(root_, "pre_tokenizer"), &pre_tokenizers_));
  if (TypeOf(model_) == "Unigram") {
    PC_RETURN_IF_ERROR(ReadUnigram());
    PC_RETURN_IF_ERROR(ReadPieces());
    PC_RETURN_IF_ERROR(ReadAddedTokens());
    out_.scores.resize(out_.tokens.size());  // added tokens have none
    ReadEnds();
    return std::move(out_);
  }
  bool byte_level = false;
  for (const Json* part : pre_tokenizers_) {
    byte_level |= TypeOf(*part) == "ByteLevel";
  }
  PC_RETURN_IF_ERROR(byte_level ? ReadByteLevel() : ReadSentencePiece());
  PC_RETURN_IF_ERROR(ReadVocabulary());
  PC_RETURN_IF_ERROR(ReadMerges());
  PC_RETURN_IF_ERROR(ReadAddedTokens());
  ReadEnds();
  return std::move(out_);
}

absl::Status Reader::ReadModel() {
  // Old files do not name the type of BPE.
  const Json& type = Field(model_, "type");
  if (type == "Unigram") return absl::OkStatus();
  if (type.is_null() ? !Field(model_, "merges").is_array() : type != "BPE") {
    return Refuse("model.type", type);
  }
  const Json& dropout = Field(model_, "dropout");
  if (!dropout.is_null() && dropout != 0) {
    return Refuse("model.dropout", dropout);
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json& value = Field(model_, key);
    if (!value.is_null() && value != "") {
      return Refuse(absl::StrCat("model.", key), value);
    }
  }
  return absl::OkStatus();
}

absl::Status Reader::CheckDecoder(
    std::initializer_list<std::string_view> known) {
  std::vector<const Json*> parts;
  PC_RETURN_IF_ERROR(
      Flatten("decoder", "decoders", Field(root_, "decoder"), &parts));
  for (const Json* part : parts) {
    bool found = false;
    for (const std::string_view type : known) found |= type == TypeOf(*part);
    if (!found) return Refuse("decoder", *part);
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadByteLevel() {
  out_.model = "gpt2";
  std::vector<std::string> steps;
  if (IsTrue(Field(model_, "ignore_merges"))) steps.push_back("whole");
  for (const Json* part : normalizers_) {
    if (TypeOf(*part) != "NFC") return Refuse("normalizer", *part);
    steps.push_back("nfc");
  }
  bool spelled = false;
  for (const Json* part : pre_tokenizers_) {
    PC_RETURN_IF_ERROR(ReadPreTokenizer(*part, &spelled, &steps));
  }
  out_.pre_tokenizer = absl::StrJoin(steps, "+");
  return CheckDecoder({"ByteLevel"});
}

// `*spelled`: bytes are characters already (byte_level.h).
absl::Status Reader::ReadPreTokenizer(const Json& part, bool* spelled,
                                      std::vector<std::string>* steps) {
  const std::string_view type = TypeOf(part);
  std::string_view step;
  if (type == "ByteLevel" && !*spelled) {
    *spelled = true;
    if (IsTrue(Field(part, "add_prefix_space"))) {
      return Refuse("pre_tokenizer", part);
    }
    const Json& use_regex = Field(part, "use_regex");
    if (use_regex.is_boolean() && !use_regex.get<bool>()) {
      return absl::OkStatus();
    }
    step = "gpt2";
  } else if (type == "Digits") {
    const bool each = IsTrue(Field(part, "individual_digits"));
    if (!*spelled) {
      step = each ? "digit" : "digits";
    } else if (!each) {
      step = "spelled-digits";
    }
  } else if (type == "Punctuation" && !*spelled) {
    if (Field(part, "behavior") == "Contiguous") step = "punctuation";
  } else if (type == "Split") {
    const Json& pattern = Field(part, "pattern");
    const bool isolated =
        Field(part, "behavior") == "Isolated" && !IsTrue(Field(part, "invert"));
    if (isolated) {
      step = PreTokenizer::StepOfPattern(Text(Field(pattern, "Regex")));
    }
    if (*spelled && step != "3digits") step = "";
  }
  if (step.empty()) return Refuse("pre_tokenizer", part);
  steps->emplace_back(step);
  return absl::OkStatus();
}

absl::Status Reader::ReadSentencePiece() {
  out_.model = "llama";
  out_.add_space_prefix = false;
  bool marks = false;
  for (const Json* part : normalizers_) {
    if (TypeOf(*part) == "Prepend" && !marks &&
        Text(Field(*part, "prepend")) == kSpaceMark) {
      out_.add_space_prefix = true;
    } else if (TypeOf(*part) == "Replace" &&
               Field(Field(*part, "pattern"), "String") == " " &&
               Text(Field(*part, "content")) == kSpaceMark) {
      marks = true;
    } else {
      return Refuse("normalizer", *part);
    }
  }
  for (const Json* part : pre_tokenizers_) {
    const std::string_view type = TypeOf(*part);
    if (type == "Metaspace" && !marks) {
      PC_RETURN_IF_ERROR(ReadMetaspace(*part));
      marks = true;
    } else if (type != "Split" || !marks ||
               Field(Field(*part, "pattern"), "String") != " ") {
      // Gemma's cuts at spaces, of which the normalizer left none.
      return Refuse("pre_tokenizer", *part);
    }
  }
  if (!marks) return Refuse("pre_tokenizer", Field(root_, "pre_tokenizer"));
  return CheckDecoder(
      {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"});
}

absl::Status Reader::ReadMetaspace(const Json& part) {
  const Json& split = Field(part, "split");
  if (Text(Field(part, "replacement")) != kSpaceMark || !split.is_boolean() ||
      split.get<bool>()) {
    return Refuse("pre_tokenizer", part);
  }
  const Json& scheme = Field(part, "prepend_scheme");
  if (scheme != "never" && scheme != "first" && scheme != "always") {
    return Refuse("pre_tokenizer", part);
  }
  out_.add_space_prefix = scheme != "never";
  out_.pre_tokenizer = "metaspace";
  return absl::OkStatus();
}

absl::Status Reader::ReadUnigram() {
  out_.model = "t5";
  PC_RETURN_IF_ERROR(ReadUnigramSteps(normalizers_, pre_tokenizers_, &out_));
  return CheckDecoder(
      {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"});
}

// Pairs of a piece and its score; a piece's place is its id.
absl::Status Reader::ReadPieces() {
  const Json& pieces = Field(model_, "vocab");
  if (!pieces.is_array() || pieces.size() > kMaxTokens) {
    return Refuse("model.vocab", pieces);
  }
  const bool byte_fallback = IsTrue(Field(model_, "byte_fallback"));
  const Json& unknown = Field(model_, "unk_id");
  if (!unknown.is_null() &&
      (!unknown.is_number_unsigned() || unknown >= pieces.size())) {
    return Refuse("model.unk_id", unknown);
  }
  for (size_t id = 0; id < pieces.size(); ++id) {
    const Json& piece = pieces[id];
    if (!piece.is_array() || piece.size() != 2 || !piece[0].is_string() ||
        !piece[1].is_number()) {
      return Refuse(absl::StrCat("model.vocab[", id, "]"), piece);
    }
    const auto& spelling = piece[0].get_ref<const std::string&>();
    TokenKind kind = TokenKind::kNormal;
    if (byte_fallback && ByteOfToken(spelling) >= 0) kind = TokenKind::kByte;
    if (unknown == id) {
      kind = TokenKind::kUnknown;
      unknown_ = spelling;
    }
    out_.tokens.push_back(spelling);
    out_.token_types.push_back(static_cast<int32_t>(kind));
    out_.scores.push_back(piece[1].get<float>());
  }
  return absl::OkStatus();
}

absl::Status Reader::SetToken(const std::string& token, const Json& id,
                              TokenKind kind) {
  if (!id.is_number_unsigned() || id.get<uint64_t>() >= kMaxTokens) {
    return Refuse(absl::StrCat("id of token ", Json(token).dump()), id);
  }
  const auto index = id.get<size_t>();
  if (index >= out_.tokens.size()) {
    out_.tokens.resize(index + 1);
    out_.token_types.resize(index + 1,
                            static_cast<int32_t>(TokenKind::kUnused));
  }
  std::string& place = out_.tokens[index];
  if (!place.empty() && place != token) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer.json: id ", index, " is both ",
                     Json(place).dump(), " and ", Json(token).dump()));
  }
  place = token;
  out_.token_types[index] = static_cast<int32_t>(kind);
  return absl::OkStatus();
}

absl::Status Reader::ReadVocabulary() {
  const Json& vocabulary = Field(model_, "vocab");
  if (!vocabulary.is_object()) return Refuse("model.vocab", vocabulary);
  const bool byte_fallback = IsTrue(Field(model_, "byte_fallback"));
  if (byte_fallback && out_.model == "gpt2") {
    return Refuse("model.byte_fallback", Field(model_, "byte_fallback"));
  }
  unknown_ = Text(Field(model_, "unk_token"));
  for (const auto& [token, id] : vocabulary.items()) {
    TokenKind kind = TokenKind::kNormal;
    if (byte_fallback && ByteOfToken(token) >= 0) kind = TokenKind::kByte;
    if (token == unknown_ && out_.model == "llama") kind = TokenKind::kUnknown;
    PC_RETURN_IF_ERROR(SetToken(token, id, kind));
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadMerges() {
  const Json& merges = Field(model_, "merges");
  if (!merges.is_array()) return Refuse("model.merges", merges);
  out_.merges.reserve(merges.size());
  for (const Json& merge : merges) {
    if (merge.is_string()) {
      out_.merges.push_back(merge.get<std::string>());
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string() && !Text(merge[0]).empty() &&
               Text(merge[0]).find(' ', 1) == std::string_view::npos) {
      out_.merges.push_back(merge[0].get<std::string>() + " " +
                            merge[1].get<std::string>());
    } else {
      return Refuse("model.merges", merge);
    }
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadAddedTokens() {
  const Json& added = Field(root_, "added_tokens");
  if (added.is_null()) return absl::OkStatus();
  if (!added.is_array()) return Refuse("added_tokens", added);
  for (const Json& token : added) {
    const Json& content = Field(token, "content");
    if (Text(content).empty()) return Refuse("added_tokens", token);
    const bool special = IsTrue(Field(token, "special"));
    // Special tokens are never met in text, however they would be cut out.
    if (!special &&
        (IsTrue(Field(token, "lstrip")) || IsTrue(Field(token, "rstrip")) ||
         IsTrue(Field(token, "single_word")))) {
      return Refuse("added_tokens", token);
    }
    TokenKind kind = special ? TokenKind::kControl : TokenKind::kUserDefined;
    if (out_.model != "gpt2" && Text(content) == unknown_) {
      kind = TokenKind::kUnknown;
    }
    PC_RETURN_IF_ERROR(
        SetToken(content.get<std::string>(), Field(token, "id"), kind));
  }
  return absl::OkStatus();
}

// Of a token's name, or of an object with its content; -1 when there is none.
int32_t Reader::IdOf(const Json& name) const {
  const std::string_view text =
      name.is_object() ? Text(Field(name, "content")) : Text(name);
  if (text.empty()) return -1;
  for (size_t i = 0; i < out_.tokens.size(); ++i) {
    if (out_.tokens[i] == text) return static_cast<int32_t>(i);
  }
  return -1;
}

void Reader::ReadEnds() {
  out_.bos_id = IdOf(Field(config_, "bos_token"));
  out_.eos_id = IdOf(Field(config_, "eos_token"));
  const Json& add_bos = Field(config_, "add_bos_token");
  const bool told = add_bos.is_boolean();
  if (told) out_.add_bos = add_bos.get<bool>() && out_.bos_id >= 0;
  std::vector<const Json*> parts;
  const Json& post = Field(root_, "post_processor");
  Flatten("post_processor", "processors", post, &parts).IgnoreError();
  for (const Json* part : parts) {
    const Json& single = Field(*part, "single");
    if (!single.is_array() || single.empty()) continue;
    const auto special = [this](const Json& item) {
      return IdOf(Field(Field(item, "SpecialToken"), "id"));
    };
    if (single.size() > 1) out_.text_end_id = special(single.back());
    const int32_t first = special(single.front());
    if (first < 0 || told) continue;
    out_.bos_id = first;
    out_.add_bos = true;
  }
}

absl::StatusOr<Json> Parse(const char* file, std::string_view text) {
  Json json = Json::parse(text, /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, " is not a JSON object"));
  }
  return json;
}

}  // namespace

absl::StatusOr<VocabularyData> ReadTokenizerJson(
    std::string_view tokenizer_json, std::string_view tokenizer_config_json) {
  PC_ASSIGN_OR_RETURN(const Json root, Parse("tokenizer.json", tokenizer_json));
  Json config;
  if (!tokenizer_config_json.empty()) {
    PC_ASSIGN_OR_RETURN(config,
                        Parse("tokenizer_config.json", tokenizer_config_json));
  }
  return Reader(root, config).Read();
}

}  // namespace promptcache::worker
