#include "inference_worker/serving/plan_execution.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "glog/logging.h"

namespace promptcache::worker {
namespace {

using pml::ContextItem;
using pml::Piece;
using pml::Plan;
using pml::PlanModule;
using pml::PlanSpan;
using pml::SpanKind;

uint32_t Size(const std::vector<int32_t>& tokens) {
  return static_cast<uint32_t>(tokens.size());
}

// Tokens of the module's pieces before `piece`: where it begins in the pages.
uint32_t PieceBase(const PlanModule& module, int32_t piece) {
  uint32_t base = 0;
  for (int32_t i = 0; i < piece; ++i) {
    base += Size(module.pieces[static_cast<size_t>(i)].tokens);
  }
  return base;
}

uint64_t TemporaryTokens(const PlanModule& module) {
  uint64_t tokens = 0;
  for (const ContextItem& item : module.context) {
    if (item.module < 0) tokens += item.tokens.size();
  }
  for (const Piece& text : module.placeholders) tokens += text.tokens.size();
  return tokens;
}

// A module's pieces and placeholders in order of offset.
struct OwnPart {
  const Piece* piece = nullptr;
  bool kept = false;
  uint32_t first_token = 0;  // in the module's pages, when kept
};

std::vector<OwnPart> OwnSequence(const PlanModule& module) {
  std::vector<OwnPart> parts;
  uint32_t base = 0;
  for (const Piece& piece : module.pieces) {
    if (!piece.tokens.empty()) parts.push_back({&piece, true, base});
    base += Size(piece.tokens);
  }
  for (const Piece& text : module.placeholders) {
    if (!text.tokens.empty()) parts.push_back({&text, false, 0});
  }
  // No two stand at the same place.
  std::sort(parts.begin(), parts.end(), [](const OwnPart& a, const OwnPart& b) {
    return a.piece->offset < b.piece->offset;
  });
  return parts;
}

}  // namespace

std::vector<bool> NeededModules(const Plan& plan,
                                const std::vector<bool>& present, bool all) {
  std::vector<bool> needed(plan.modules.size(), all);
  for (const PlanSpan& span : plan.spans) {
    if (span.kind == SpanKind::kCached) {
      needed[static_cast<size_t>(span.module)] = true;
    }
  }
  pml::ContextWalk walk;
  // A context names modules of lower index only.
  for (size_t i = plan.modules.size(); i-- > 0;) {
    if (!needed[i] || present[i]) continue;
    for (const ContextItem& item : walk.New(plan.modules[i].context)) {
      if (item.module >= 0) needed[static_cast<size_t>(item.module)] = true;
    }
  }
  return needed;
}

PlanExecution::PlanExecution(std::shared_ptr<const Plan> plan,
                             const KvLayout& layout, const Options& options)
    : plan_(std::move(plan)), layout_(layout), options_(options) {
  modules_.resize(plan_->modules.size());
  generated_.reserve(options_.max_new_tokens);
  start_token_ = options_.decoder_start.value_or(0);
  if (options_.full_attention) {
    for (const PlanSpan& span : plan_->spans) {
      flat_tokens_.insert(flat_tokens_.end(), span.tokens.begin(),
                          span.tokens.end());
    }
    num_fresh_tokens_ = Size(flat_tokens_);
    next_position_ = static_cast<int32_t>(num_fresh_tokens_);
  } else {
    CutIntoParts(options_.link_tokens);
    next_position_ = plan_->next_position;
  }
  if (has_encoder()) next_position_ = 1;
  tail_.read.reserve(max_tail_pages());
  tail_.write.reserve(max_tail_pages());
}

void PlanExecution::CutIntoParts(uint32_t link_tokens) {
  for (uint32_t i = 0; i < plan_->spans.size(); ++i) {
    const PlanSpan& span = plan_->spans[i];
    const uint32_t size = Size(span.tokens);
    if (span.kind == SpanKind::kFresh || has_encoder()) {
      parts_.push_back({span.kind, i, 0, size});
      continue;
    }
    const PlanModule& module = plan_->modules[static_cast<size_t>(span.module)];
    const uint32_t base = PieceBase(module, span.piece);
    // Nothing stands before the first span: its states are exact already.
    uint32_t linked = 0;
    if (i > 0 && link_tokens > base)
      linked = std::min(link_tokens - base, size);
    // Logits need a row: the last token of the plan is computed.
    const bool last = i + 1 == plan_->spans.size() && linked < size;
    const uint32_t read = size - linked - (last ? 1 : 0);
    if (linked > 0) parts_.push_back({SpanKind::kFresh, i, 0, linked, true});
    if (read > 0) parts_.push_back({SpanKind::kCached, i, linked, read});
    if (last) parts_.push_back({SpanKind::kFresh, i, size - 1, 1});
  }
  for (const SpanPart& part : parts_) {
    if (part.kind == SpanKind::kFresh) num_fresh_tokens_ += part.count;
  }
}

uint64_t PlanExecution::tail_pages(size_t num_generated) const {
  const uint64_t first = has_encoder() ? 1 : 0;
  return layout_.PagesFor(uint64_t{num_fresh_tokens_} + first + num_generated);
}

uint64_t PlanExecution::module_pages(size_t module) const {
  return layout_.PagesFor(
      static_cast<uint64_t>(plan_->modules[module].num_tokens()));
}

uint64_t PlanExecution::temporary_pages(size_t module) const {
  return layout_.PagesFor(TemporaryTokens(plan_->modules[module]));
}

uint64_t PlanExecution::module_rows(size_t module) const {
  return static_cast<uint64_t>(plan_->modules[module].num_tokens()) +
         TemporaryTokens(plan_->modules[module]);
}

void PlanExecution::AddTail(std::span<std::byte* const> pages) {
  CHECK_LE(tail_.write.size() + pages.size(), max_tail_pages());
  tail_.read.insert(tail_.read.end(), pages.begin(), pages.end());
  tail_.write.insert(tail_.write.end(), pages.begin(), pages.end());
}

std::vector<std::byte*> PlanExecution::TakeTail() {
  CHECK(plan_views_.empty()) << "rows name its pages";
  tail_.read.clear();
  const std::vector<std::byte*> pages = tail_.write;
  tail_.write.clear();  // its room stays: views will point into it
  return pages;
}

void PlanExecution::SetReadable(size_t module,
                                std::vector<const std::byte*> pages) {
  CHECK_EQ(pages.size(), module_pages(module));
  modules_[module].read = std::move(pages);
  modules_[module].write.clear();
}

void PlanExecution::SetWritable(size_t module,
                                std::vector<const std::byte*> read_pages,
                                std::vector<std::byte*> write_pages) {
  CHECK_EQ(read_pages.size(), module_pages(module));
  CHECK_EQ(write_pages.size(), module_pages(module));
  modules_[module].read = std::move(read_pages);
  modules_[module].write = std::move(write_pages);
}

KvView PlanExecution::ModuleView(size_t module, uint32_t first_token,
                                 uint32_t num_tokens, int32_t position_offset,
                                 int32_t local_position) const {
  const PageTable& table = modules_[module];
  CHECK(!table.read.empty()) << "module " << module << " has no pages";
  return {.pages = table.read.data(),
          .first_token = first_token,
          .num_tokens = num_tokens,
          .position_offset = position_offset,
          .local_position = local_position};
}

// Tokens [first_token, first_token + num_tokens) of another module's pieces:
// one view per piece that they touch.
void PlanExecution::PushStates(const ContextItem& item,
                               std::vector<KvView>* views) const {
  const auto seen = static_cast<size_t>(item.module);
  const auto begin = static_cast<uint32_t>(item.first_token);
  const uint32_t end = begin + static_cast<uint32_t>(item.num_tokens);
  uint32_t base = 0;
  for (const Piece& piece : plan_->modules[seen].pieces) {
    const uint32_t lo = std::max(begin, base);
    const uint32_t hi = std::min(end, base + Size(piece.tokens));
    if (lo < hi) {
      views->push_back(
          ModuleView(seen, lo, hi - lo, item.offset,
                     piece.offset + static_cast<int32_t>(lo - base)));
    }
    base += Size(piece.tokens);
  }
}

void PlanExecution::PushRun(Run run) {
  rows_left_ += run.tokens.size();
  runs_.push_back(run);
}

void PlanExecution::ZeroUnusedSlots(size_t module) {
  const auto tokens =
      static_cast<uint32_t>(plan_->modules[module].num_tokens());
  const uint32_t used = tokens % layout_.page_tokens;
  if (used == 0) return;
  std::byte* page = modules_[module].write.back();
  const size_t stride = layout_.token_stride_bytes();
  const size_t heads = size_t{2} * layout_.num_layers * layout_.num_kv_heads;
  const KvMemory::Rows rows{.first = page + used * stride,
                            .pitch = layout_.head_stride_bytes(),
                            .width = (layout_.page_tokens - used) * stride,
                            .height = heads};
  if (options_.memory != nullptr && options_.memory->on_gpu()) {
    memory_status_.Update(options_.memory->Zero(rows));
    return;
  }
  for (size_t h = 0; h < heads; ++h) {
    std::memset(rows.first + h * rows.pitch, 0, rows.width);
  }
}

void PlanExecution::EncodeModule(size_t module,
                                 std::vector<std::byte*> temporary_pages) {
  const PlanModule& m = plan_->modules[module];
  CHECK_EQ(temporary_pages.size(), this->temporary_pages(module));
  CHECK(!modules_[module].write.empty()) << "module " << module;
  ZeroUnusedSlots(module);
  if (options_.chunk_tokens > 0) return EncodeChunk(module);

  PageTable& temp = temporaries_.emplace_back();
  temp.read.assign(temporary_pages.begin(), temporary_pages.end());
  temp.write = std::move(temporary_pages);
  uint32_t temp_used = 0;
  std::vector<KvView>& views = module_views_.emplace_back();

  // First what is written where; then, with `views` complete, the runs: each
  // sees the views before its own.
  struct Draft {
    const std::vector<int32_t>* tokens;
    int32_t position;
    size_t own;  // index into views
    bool kept;
  };
  std::vector<Draft> drafts;
  const auto temporary = [&](const std::vector<int32_t>& tokens,
                             int32_t position_offset, int32_t local_position) {
    drafts.push_back(
        {&tokens, position_offset + local_position, views.size(), false});
    views.push_back({temp.read.data(), temp_used, Size(tokens), position_offset,
                     local_position});
    temp_used += Size(tokens);
  };
  for (const ContextItem& item : m.context) {
    if (item.module >= 0) {
      PushStates(item, &views);
    } else if (!item.tokens.empty()) {
      temporary(item.tokens, item.offset, 0);
    }
  }
  for (const OwnPart& part : OwnSequence(m)) {
    if (!part.kept) {
      temporary(part.piece->tokens, 0, part.piece->offset);
      continue;
    }
    drafts.push_back(
        {&part.piece->tokens, part.piece->offset, views.size(), true});
    views.push_back(ModuleView(module, part.first_token,
                               Size(part.piece->tokens), 0,
                               part.piece->offset));
  }

  for (const Draft& draft : drafts) {
    const bool first = &draft == &drafts.front();
    Run run;
    run.tokens = *draft.tokens;
    run.position = draft.position;
    run.embedding_position_offset = m.schema_start;
    if (has_encoder()) {
      run.part = first ? RowPart::kEncoder : RowPart::kEncoderContinued;
    } else {
      run.visible = std::span<const KvView>(views).first(draft.own);
    }
    run.own = views[draft.own];
    run.own.num_tokens = 0;
    run.write_pages =
        draft.kept ? modules_[module].write.data() : temp.write.data();
    PushRun(run);
  }
}

KvView PlanExecution::CachedPartView(const SpanPart& part) const {
  const PlanSpan& span = plan_->spans[part.span];
  const auto module = static_cast<size_t>(span.module);
  const PlanModule& m = plan_->modules[module];
  const Piece& piece = m.pieces[static_cast<size_t>(span.piece)];
  return ModuleView(module, PieceBase(m, span.piece) + part.first, part.count,
                    span.start - piece.offset,
                    piece.offset + static_cast<int32_t>(part.first));
}

KvView PlanExecution::FreshPartView(const SpanPart& part,
                                    uint32_t tail_used) const {
  const int32_t start =
      plan_->spans[part.span].start + static_cast<int32_t>(part.first);
  const bool chunks = options_.chunk_tokens > 0;
  return {.pages = tail_.read.data(),
          .first_token = tail_used,
          .num_tokens = part.count,
          .position_offset = chunks ? 0 : start,
          .local_position = chunks ? start : 0};
}

void PlanExecution::ComputeFull() {
  Run run;
  run.tokens = flat_tokens_;
  run.own.pages = tail_.read.data();
  run.write_pages = tail_.write.data();
  run.logits = true;
  PushRun(run);
  frame_ = run;
  frame_.own.num_tokens = Size(flat_tokens_);
}

void PlanExecution::ComputeFresh() {
  CHECK_GE(tail_.read.size(), tail_pages(0));
  if (has_encoder()) return ComputeSegments();
  if (options_.full_attention) return ComputeFull();

  uint32_t tail_used = 0;
  plan_views_.clear();
  // Runs point into it while chunks of the answer are added.
  if (options_.chunk_tokens > 0) {
    plan_views_.reserve(parts_.size() + 1 +
                        options_.max_new_tokens / options_.chunk_tokens);
  }
  for (const SpanPart& part : parts_) {
    if (part.kind == SpanKind::kFresh) {
      plan_views_.push_back(FreshPartView(part, tail_used));
      tail_used += part.count;
      continue;
    }
    plan_views_.push_back(CachedPartView(part));
  }

  Run run;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const SpanPart& part = parts_[i];
    if (part.kind != SpanKind::kFresh) continue;
    run = Run{};
    run.tokens = std::span<const int32_t>(plan_->spans[part.span].tokens)
                     .subspan(part.first, part.count);
    run.position =
        plan_views_[i].position_offset + plan_views_[i].local_position;
    run.visible = std::span<const KvView>(plan_views_).first(i);
    run.own = plan_views_[i];
    run.own.num_tokens = 0;
    run.write_pages = tail_.write.data();
    run.logits = i + 1 == parts_.size();
    PushRun(run);
  }

  const auto last_end = run.position + static_cast<int32_t>(run.tokens.size());
  if (!parts_.empty() && last_end == next_position_) {
    frame_ = run;
    frame_.own.num_tokens = static_cast<uint32_t>(run.tokens.size());
    // It grows, and is seen when it is whole.
    if (options_.chunk_tokens > 0) plan_views_.pop_back();
  } else {
    // Decoding goes on past positions that stand earlier in the plan.
    frame_ = Run{};
    frame_.visible = plan_views_;
    frame_.own = {tail_.read.data(), tail_used, 0, next_position_, 0};
    frame_.write_pages = tail_.write.data();
  }
}

void PlanExecution::Append(std::span<const int32_t> tokens) {
  CHECK(!tokens.empty());
  CHECK_LE(generated_.size() + tokens.size(), options_.max_new_tokens);
  const size_t before = generated_.size();
  generated_.insert(generated_.end(), tokens.begin(), tokens.end());
  // Only the last row of what is queued has a use for logits.
  if (!runs_.empty()) runs_.back().logits = false;
  size_t first = before;
  while (first < generated_.size()) {
    size_t count = generated_.size() - first;
    if (options_.chunk_tokens > 0) {
      if (frame_.own.num_tokens == options_.chunk_tokens) NextChunk();
      count = std::min<size_t>(count,
                               options_.chunk_tokens - frame_.own.num_tokens);
    }
    Run run = frame_;
    run.tokens = std::span<const int32_t>(generated_).subspan(first, count);
    run.position = next_position_ + static_cast<int32_t>(first);
    run.logits = false;
    PushRun(run);
    frame_.own.num_tokens += static_cast<uint32_t>(count);
    first += count;
  }
  runs_.back().logits = true;
}

// Of a run, when there is room for so many; a segment is taken with its first
// run, as a whole or not at all.
size_t PlanExecution::RowsToTake(size_t run, size_t room) const {
  const size_t rows = runs_[run].tokens.size();
  if (runs_[run].part == RowPart::kDecoder) return std::min(rows, room);
  if (runs_[run].part == RowPart::kEncoderContinued || run == 0) return rows;
  size_t all = rows;
  for (size_t i = run + 1; i < runs_.size(); ++i) {
    if (runs_[i].part != RowPart::kEncoderContinued) break;
    all += runs_[i].tokens.size();
  }
  return all <= room ? rows : 0;
}

size_t PlanExecution::NextRows(size_t max_rows,
                               std::vector<RowGroup>* groups) const {
  size_t taken = 0;
  for (size_t i = 0; i < runs_.size(); ++i) {
    const Run& run = runs_[i];
    const size_t rows = RowsToTake(i, max_rows - std::min(taken, max_rows));
    if (rows == 0) break;
    RowGroup group;
    group.tokens = run.tokens.first(rows);
    group.position = run.position;
    group.embedding_position_offset = run.embedding_position_offset;
    group.visible = run.visible;
    group.own = run.own;
    group.own.num_tokens += static_cast<uint32_t>(rows);
    group.own_write_pages = run.write_pages;
    group.part = run.part;
    group.arrivals = arrivals_;
    group.logits = run.logits && rows == run.tokens.size()
                       ? LogitsWanted::kLast
                       : LogitsWanted::kNone;
    groups->push_back(group);
    taken += rows;
  }
  return taken;
}

void PlanExecution::Advance(size_t num_rows) {
  CHECK_LE(num_rows, rows_left_);
  rows_left_ -= num_rows;
  rows_done_ += num_rows;
  while (num_rows > 0) {
    Run& run = runs_.front();
    const size_t rows = std::min(run.tokens.size(), num_rows);
    num_rows -= rows;
    if (rows == run.tokens.size()) {
      runs_.pop_front();
      continue;
    }
    run.tokens = run.tokens.subspan(rows);
    run.position += static_cast<int32_t>(rows);
    run.own.num_tokens += static_cast<uint32_t>(rows);
  }
}

}  // namespace promptcache::worker
