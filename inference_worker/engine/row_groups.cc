#include "inference_worker/engine/row_groups.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/engine/sampler.h"

namespace promptcache::worker {
namespace {

// Keeps every sum of two counts or positions within int32.
constexpr int64_t kMaxTokens = int64_t{1} << 30;

template <typename... Args>
absl::Status Invalid(const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat(args...));
}

// The entries of a page table that hold tokens [first, end) of a view.
absl::Status CheckTable(const std::byte* const* pages, const char* what,
                        const KvView& view, uint32_t first, uint32_t end,
                        uint32_t page_tokens) {
  if (first == end) return absl::OkStatus();
  if (pages == nullptr) return Invalid(what, " is null");
  const uint32_t last_page = (view.first_token + end - 1) / page_tokens;
  for (uint32_t p = (view.first_token + first) / page_tokens; p <= last_page;
       ++p) {
    if (pages[p] == nullptr) return Invalid(what, "[", p, "] is null");
  }
  return absl::OkStatus();
}

absl::Status CheckView(const KvView& view, const PassLimits& limits) {
  if (view.first_token > kMaxTokens || view.num_tokens > kMaxTokens) {
    return Invalid("view of tokens ", view.first_token, " + ", view.num_tokens,
                   " exceeds ", kMaxTokens);
  }
  const int64_t first = view.local_position;
  const int64_t last = first + view.num_tokens;
  if (first < -int64_t{limits.max_distance} ||
      last > int64_t{limits.max_distance} + 1) {
    return Invalid("local positions ", first, " to ", last - 1,
                   " exceed the context of ", limits.max_distance + 1);
  }
  return CheckTable(view.pages, "page table", view, 0, view.num_tokens,
                    limits.layout.page_tokens);
}

// Queries at [position, position + rows) turn into the frame of the view.
absl::Status CheckDistance(const RowGroup& group, const KvView& view,
                           const PassLimits& limits) {
  const int64_t first = int64_t{group.position} - int64_t{view.position_offset};
  const int64_t last = first + static_cast<int64_t>(group.tokens.size()) - 1;
  if (first < -int64_t{limits.max_distance} || last > limits.max_distance) {
    return Invalid("positions ", group.position, " to ",
                   int64_t{group.position} + last - first,
                   " are too far from the origin ", view.position_offset,
                   ": the context is ", limits.max_distance + 1);
  }
  return absl::OkStatus();
}

absl::Status CheckEmbeddingPositions(const RowGroup& group,
                                     const PassLimits& limits) {
  if (limits.num_positions == 0 || group.tokens.empty()) {
    return absl::OkStatus();
  }
  const int64_t first =
      int64_t{group.position} + group.embedding_position_offset;
  const int64_t last = first + static_cast<int64_t>(group.tokens.size()) - 1;
  if (first < 0 || last >= int64_t{limits.num_positions}) {
    return Invalid("positions ", first, " to ", last, " are not all among the ",
                   limits.num_positions, " that the model has learned");
  }
  return absl::OkStatus();
}

absl::Status CheckOwn(const RowGroup& group, const PassLimits& limits) {
  const KvView& own = group.own;
  const size_t rows = group.tokens.size();
  PC_RETURN_IF_ERROR(CheckView(own, limits));
  if (own.num_tokens < rows) {
    return Invalid("own view has ", own.num_tokens, " tokens, fewer than ",
                   rows, " rows");
  }
  const auto first_row = own.num_tokens - static_cast<uint32_t>(rows);
  const int64_t expected =
      int64_t{own.position_offset} + own.local_position + int64_t{first_row};
  if (rows > 0 && expected != group.position) {
    return Invalid("rows begin at position ", group.position,
                   ", by the own view at ", expected);
  }
  PC_RETURN_IF_ERROR(CheckDistance(group, own, limits));
  return CheckTable(group.own_write_pages, "write page table", own, first_row,
                    own.num_tokens, limits.layout.page_tokens);
}

bool IsEncoder(const RowGroup& group) {
  return group.part != RowPart::kDecoder;
}

// `before`: the group before it; null for the first.
absl::Status CheckPart(const RowGroup& group, const RowGroup* before,
                       const PassLimits& limits) {
  if (!limits.encoder_decoder) {
    if (!IsEncoder(group)) return absl::OkStatus();
    return Invalid("rows of an encoder, which the model does not have");
  }
  if (!IsEncoder(group)) {
    for (const KvView& view : group.visible) {
      if (view.num_tokens > 0) return absl::OkStatus();
    }
    if (group.tokens.empty()) return absl::OkStatus();
    return Invalid("rows of the decoder see nothing of an encoder");
  }
  if (group.part == RowPart::kEncoderContinued &&
      (before == nullptr || !IsEncoder(*before))) {
    return Invalid("a segment is continued that was not begun");
  }
  if (group.own.num_tokens != group.tokens.size()) {
    return Invalid("own view has ", group.own.num_tokens, " tokens, the ",
                   group.tokens.size(), " rows of the encoder must be all");
  }
  if (!group.visible.empty()) {
    return Invalid("rows of the encoder see ", group.visible.size(), " views");
  }
  if (group.logits != LogitsWanted::kNone) {
    return Invalid("rows of the encoder have no logits");
  }
  return absl::OkStatus();
}

absl::Status CheckChoice(const RowGroup& group, const PassLimits& limits) {
  if (group.choice == nullptr) return absl::OkStatus();
  if (!limits.chooses_tokens) {
    return Invalid("a token is to be chosen, which this backend does not do");
  }
  if (group.logits != LogitsWanted::kLast || group.tokens.empty()) {
    return Invalid("a token is to be chosen, but not after one last row");
  }
  return group.choice->options.Validate();
}

absl::Status CheckGroup(const RowGroup& group, const RowGroup* before,
                        const PassLimits& limits) {
  if (group.tokens.size() > kMaxTokens) {
    return Invalid(group.tokens.size(), " rows exceed ", kMaxTokens);
  }
  PC_RETURN_IF_ERROR(CheckPart(group, before, limits));
  PC_RETURN_IF_ERROR(CheckChoice(group, limits));
  PC_RETURN_IF_ERROR(CheckTokens(group.tokens, limits.vocab_size));
  PC_RETURN_IF_ERROR(CheckEmbeddingPositions(group, limits));
  PC_RETURN_IF_ERROR(CheckOwn(group, limits));
  for (size_t v = 0; v < group.visible.size(); ++v) {
    const KvView& view = group.visible[v];
    absl::Status status = CheckView(view, limits);
    // What the encoder has put out has no position.
    if (status.ok() && view.num_tokens > 0 && !limits.encoder_decoder) {
      status = CheckDistance(group, view, limits);
    }
    if (!status.ok()) return Invalid("view ", v, ": ", status.message());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTokens(std::span<const int32_t> tokens, uint32_t vocab_size) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || static_cast<uint32_t>(tokens[i]) >= vocab_size) {
      return Invalid("token ", i, " is ", tokens[i], ", the vocabulary has ",
                     vocab_size);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRowGroups(std::span<const RowGroup> groups,
                            const PassLimits& limits) {
  int64_t num_rows = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    const RowGroup* before = g > 0 ? &groups[g - 1] : nullptr;
    if (absl::Status s = CheckGroup(groups[g], before, limits); !s.ok()) {
      return Invalid("row group ", g, ": ", s.message());
    }
    num_rows += static_cast<int64_t>(groups[g].tokens.size());
  }
  if (num_rows > kMaxTokens) {
    return Invalid("a pass of ", num_rows, " rows exceeds ", kMaxTokens);
  }
  return absl::OkStatus();
}

size_t NumLogitRows(const RowGroup& group) {
  switch (group.logits) {
    case LogitsWanted::kNone:
      return 0;
    case LogitsWanted::kLast:
      return group.tokens.empty() ? 0 : 1;
    case LogitsWanted::kAll:
      return group.tokens.size();
  }
  return 0;
}

}  // namespace promptcache::worker
