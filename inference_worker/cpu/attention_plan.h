#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "inference_worker/cpu/isa_kernels.h"
#include "inference_worker/cpu/kernels.h"

namespace promptcache::worker::cpu {

// The table as kernels see it; null: nothing is rotated.
RopeView ViewOf(const RopeTable* rope);

// Cuts one call of Attend into tasks of about equal cost: blocks of query rows
// for one kv head, and, where there are too few of those for the threads
// (decoding), ranges of segments of a block, whose states the last task of the
// block to end merges. Which cut is made cannot be seen in the results: the
// order of summation is the same either way (isa_kernels.h).
//
// Thread-compatible; RunTask may run on several threads at once. Kept between
// calls for its memory.
struct AttentionPlan {
  void Build(const AttentionShape& shape,
             std::span<const AttentionGroup> groups, uint32_t num_threads);
  size_t num_tasks() const { return tasks.size(); }
  void RunTask(const IsaKernels& isa, size_t index, std::byte* scratch);

  struct Task {
    AttentionTask work;
    // Index into blocks when the block is split, else -1.
    int32_t block = -1;
  };
  // A split block of rows.
  struct Block {
    AttentionTask merge;  // all of its segments
    uint32_t num_tasks = 0;
    size_t state_offset = 0;  // floats into states
  };

  std::vector<AttentionSegment> segments;
  std::vector<Task> tasks;
  std::vector<Block> blocks;
  std::unique_ptr<std::atomic<uint32_t>[]> tasks_left;
  size_t tasks_left_capacity = 0;
  std::vector<float> states;

 private:
  struct GroupSegments {
    size_t first = 0;
    uint32_t count = 0;
  };
  GroupSegments AddSegments(const AttentionGroup& group);
  void AddView(const KvView& view, bool own, int64_t tokens_before);
  void AddBlock(AttentionTask whole, uint64_t cost_per_task);
};

}  // namespace promptcache::worker::cpu
