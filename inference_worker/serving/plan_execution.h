#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/kv_layout.h"
#include "common/kv_view.h"
#include "common/pml/plan.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/kv_memory.h"

namespace promptcache::worker {

// A stretch of one plan span that is either read (states of a module) or
// computed as fresh rows: the span cut where the repair option or the rule of
// the last token recompute some of a cached span's tokens.
struct SpanPart {
  pml::SpanKind kind = pml::SpanKind::kFresh;
  uint32_t span = 0;
  uint32_t first = 0;  // within the span
  uint32_t count = 0;
  bool linked = false;  // recomputed by the repair option
};

// Which modules must have states: those that spans use and, of every module
// that must be encoded (`present[i]` false), what it sees. Parallel to
// plan.modules. With `all`, every module is a target.
std::vector<bool> NeededModules(const pml::Plan& plan,
                                const std::vector<bool>& present,
                                bool all = false);

// A plan lowered to rows: what to compute, in which frame (KvView's origin),
// seeing what, written where. The same plan gives the same views and the same
// rows wherever a module's pages lie and whoever computed them; therefore
// cached and bypassed results are equal bit for bit.
//
// Rows form one queue in dependency order: modules in the order in which they
// were added, then fresh parts in plan order, then generated tokens. A row
// sees only what stands before it in the queue, so any prefix of the queue may
// be one pass. But a segment of an encoder, whose tokens all see each other, is
// in one pass as a whole.
//
// Pages are given, never owned. Thread-compatible; not movable, since views
// point into it.
class PlanExecution {
 public:
  struct Options {
    // The plan's tokens as one causal sequence at positions 0..n-1.
    bool full_attention = false;
    // Repair: the first tokens of each module are computed as fresh ones.
    uint32_t link_tokens = 0;
    // Room for decoding.
    uint32_t max_new_tokens = 0;
    // The plan is a prefix cut into modules of so many tokens (prefix_plan.h):
    // fresh and generated tokens go on as such modules would, each a view of
    // its own, keys rotated to where they stand. 0: another plan.
    uint32_t chunk_tokens = 0;
    // Encoder-decoder models: what the decoder begins with. The plan is one
    // without contexts (segment_plan.h); each module, and each run of fresh
    // spans, is a segment of the encoder, and generated tokens, at positions
    // from 1, see all segments. Links do nothing, and a plan that ends in a
    // module needs no token anew.
    std::optional<int32_t> decoder_start;
    // Where pages lie; null: on the CPU.
    KvMemory* memory = nullptr;
  };

  PlanExecution(std::shared_ptr<const pml::Plan> plan, const KvLayout& layout,
                const Options& options);
  PlanExecution(const PlanExecution&) = delete;
  PlanExecution& operator=(const PlanExecution&) = delete;

  const pml::Plan& plan() const { return *plan_; }
  const std::vector<SpanPart>& parts() const { return parts_; }
  // Position of the first generated token.
  int32_t next_position() const { return next_position_; }

  // The tail's with so many generated tokens, and the most that it may need.
  uint64_t tail_pages(size_t num_generated) const;
  uint64_t max_tail_pages() const {
    return tail_pages(options_.max_new_tokens);
  }
  uint64_t module_pages(size_t module) const;
  // For texts that a module saw and whose states are thrown away.
  uint64_t temporary_pages(size_t module) const;
  // That EncodeModule queues, those of such texts included.
  uint64_t module_rows(size_t module) const;

  // Pages at the tail's end. REQUIRES: never more than max_tail_pages.
  void AddTail(std::span<std::byte* const> pages);
  // All of them. REQUIRES: ComputeFresh was not called.
  std::vector<std::byte*> TakeTail();
  uint64_t num_tail_pages() const { return tail_.write.size(); }
  // What the tail lacks for the rows that are queued. REQUIRES of NextRows: 0.
  uint64_t missing_tail_pages() const {
    return tail_pages(generated_.size()) - tail_.write.size();
  }
  // REQUIRES: as many pages as the functions above say.
  void SetReadable(size_t module, std::vector<const std::byte*> pages);
  void SetWritable(size_t module, std::vector<const std::byte*> read_pages,
                   std::vector<std::byte*> write_pages);

  // Queues the rows that compute a module's states, and zeroes the unused
  // slots of its last page (a GPU's failure to do so is in memory_status).
  // REQUIRES: SetWritable; every module that it sees has its pages and is
  // readable or was queued before.
  void EncodeModule(size_t module, std::vector<std::byte*> temporary_pages);
  const absl::Status& memory_status() const { return memory_status_; }

  // Readable pages that are still being filled. Groups name all of these until
  // they are cleared; they must live until then.
  void AddArrival(Arrival* arrival) { arrivals_.push_back(arrival); }
  void ClearArrivals() { arrivals_.clear(); }
  // Queues the fresh parts; the last row gives logits. REQUIRES: the pages of
  // tail_pages(0), and of every module that a span uses.
  void ComputeFresh();
  // Queues generated tokens after the plan (one, or many when a request is
  // computed again); the last gives logits, the rows before it none.
  // REQUIRES: ComputeFresh; no more than max_new_tokens in total.
  void Append(std::span<const int32_t> tokens);

  size_t rows_left() const { return rows_left_; }
  size_t rows_done() const { return rows_done_; }
  // With chunk_tokens: the pages of the tail's whole chunks, all of whose rows
  // were computed. Empty when a chunk is not whole pages.
  std::span<const std::byte* const> WholeTailChunks() const;
  // Groups of the next rows, at most `max_rows`, or more when the first ones
  // are an encoder's segment; returns how many. Valid until the next non-const
  // call.
  size_t NextRows(size_t max_rows, std::vector<RowGroup>* groups) const;
  // These rows were computed.
  void Advance(size_t num_rows);

 private:
  struct PageTable {
    std::vector<const std::byte*> read;
    std::vector<std::byte*> write;
  };
  // Consecutive rows of one piece, text or fresh part.
  struct Run {
    std::span<const int32_t> tokens;
    int32_t position = 0;
    int32_t embedding_position_offset = 0;
    std::span<const KvView> visible;
    KvView own;  // num_tokens: those before the run's first token
    std::byte* const* write_pages = nullptr;
    bool logits = false;
    RowPart part = RowPart::kDecoder;
  };

  bool has_encoder() const { return options_.decoder_start.has_value(); }
  void CutIntoParts(uint32_t link_tokens);
  void PushRun(Run run);
  KvView ModuleView(size_t module, uint32_t first_token, uint32_t num_tokens,
                    int32_t position_offset, int32_t local_position) const;
  void PushStates(const pml::ContextItem& item,
                  std::vector<KvView>* views) const;
  void ZeroUnusedSlots(size_t module);
  void EncodeChunk(size_t module);
  KvView CachedPartView(const SpanPart& part) const;
  KvView FreshPartView(const SpanPart& part, uint32_t tail_used) const;
  void NextChunk();
  void ComputeFull();
  void PushSegmentRun(std::span<const int32_t> tokens, uint32_t in_segment,
                      uint32_t* tail_used);
  void ComputeSegments();
  size_t RowsToTake(size_t run, size_t room) const;

  const std::shared_ptr<const pml::Plan> plan_;
  const KvLayout layout_;
  const Options options_;
  std::vector<SpanPart> parts_;
  std::vector<int32_t> flat_tokens_;  // full attention: the plan's tokens
  int32_t start_token_ = 0;           // of the decoder
  uint32_t num_fresh_tokens_ = 0;
  int32_t next_position_ = 0;

  std::vector<PageTable> modules_;
  PageTable tail_;  // grows where it stands: views point into it
  std::deque<PageTable> temporaries_;
  // Of the module being encoded: what it sees, then its own parts. One vector
  // a module, complete before a run points into it.
  std::deque<std::vector<KvView>> module_views_;
  // With chunk_tokens, of the first modules: one list of what all see.
  std::vector<KvView> chunk_views_;
  std::vector<KvView> plan_views_;  // one per part, in plan order
  // The frame that generated tokens continue.
  Run frame_;
  std::vector<int32_t> generated_;

  std::vector<Arrival*> arrivals_;
  absl::Status memory_status_;
  std::deque<Run> runs_;  // the first may be partly done
  size_t rows_left_ = 0;
  size_t rows_done_ = 0;
};

}  // namespace promptcache::worker
