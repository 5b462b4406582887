"""The faults that plant_faults plants: exact texts and what to put there."""

import dataclasses

KERNEL = "cuda/kernels/attention_kernel.cuh"
BLOCK = "cuda/kernels/attention_block.cuh"
STORE = "cuda/kernels/attention_store.cuh"
MERGE = "cuda/kernels/attention_merge.cu"
PLAN = "cuda/kernels/attention_plan.cc"
LAUNCH = "cuda/kernels/attention.cu"
CASE = "tests/cuda_on_cpu/attention_case.cc"
STEP = "inference_worker/serving/scheduler_step.cc"
BACKEND = "inference_worker/engine/cuda_backend.cc"


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    file: str
    text: str      # stands in the file once
    instead: str
    mode: str = "late"
    rebuild: tuple = ("hd64",)


FAULTS = [
    Fault("barrier_after_the_wait", KERNEL,
          "    CpAsyncWait<1>();\n    __syncthreads();\n",
          "    CpAsyncWait<1>();\n"),
    Fault("barrier_before_the_next_copy", KERNEL,
          "    __syncthreads();  // the next copy overwrites this buffer\n", "",
          mode="race"),
    Fault("barrier_after_rotated_keys", KERNEL,
          "      block.TurnKeys(part, keys);\n      __syncthreads();\n",
          "      block.TurnKeys(part, keys);\n", mode="race"),
    Fault("barrier_before_the_warps_merge", STORE,
          "  __syncthreads();\n", "", mode="reverse"),
    Fault("wait_count", KERNEL, "CpAsyncWait<1>();", "CpAsyncWait<2>();"),
    Fault("bound_of_the_copy", BLOCK,
          "at.token + token < static_cast<int>(part.end_token);",
          "at.token + token < static_cast<int>(part.end_token) + 9;"),
    Fault("tail_not_masked", KERNEL,
          "limits.end[h] = min(seen.end_token, static_cast<int>("
          "part.end_token));",
          "limits.end[h] = seen.end_token + 1;"),
    Fault("causal_off_by_one", PLAN,
          ": g.own.num_tokens - g.num_rows + index + 1;",
          ": g.own.num_tokens - g.num_rows + index;", rebuild=("plan",)),
    Fault("window_off_by_one", KERNEL, "max(0, seen.reach - window);",
          "max(0, seen.reach - window + 1);"),
    Fault("window_skips_a_tile", BLOCK,
          "hidden / kTile * kTile;", "(hidden + kTile - 1) / kTile * kTile;"),
    Fault("offset_sign", PLAN,
          "static_cast<int32_t>(row.index) -\n",
          "static_cast<int32_t>(row.index) +\n", rebuild=("plan",)),
    Fault("negative_distance_rotates_forward", BLOCK,
          "position < 0 ? -factor : factor", "factor"),
    Fault("queries_of_the_view_before", PLAN,
          "      part.same_frame = 0;\n", "", rebuild=("plan",)),
    Fault("swizzle_missing_on_read", KERNEL,
          "LoadMatrix(k, Block::Rows::Chunk(tile, row, 2 * step + "
          "(lane >> 3 & 1)));",
          "LoadMatrix(k, tile + row * kHeadDim + (2 * step + "
          "(lane >> 3 & 1)) * 8);"),
    Fault("swizzle_is_no_swizzle", BLOCK,
          "kSwizzled ? chunk ^ (row & 7) : chunk;", "chunk;"),
    Fault("shuffle_missing", KERNEL,
          "    maximum = fmaxf(maximum, __shfl_xor_sync("
          "kAllLanes, maximum, 2));\n", ""),
    Fault("divergent_shuffle", KERNEL,
          "    maximum = fmaxf(maximum, __shfl_xor_sync("
          "kAllLanes, maximum, 1));\n",
          "    if (lane_of_state() < 16) maximum = fmaxf(maximum, "
          "__shfl_xor_sync(kAllLanes, maximum, 1));\n"
          .replace("lane_of_state()", "(threadIdx.x & 31)")),
    Fault("empty_row_guard", KERNEL,
          "const float base = maximum == kMinusInfinity ? 0.0f : maximum;",
          "const float base = maximum;"),
    Fault("sums_not_rescaled", KERNEL,
          "      state->out[n][2 * h + 1] *= factor;\n", ""),
    Fault("page_index", BLOCK, "part.first_page + (place >> shift)",
          "part.first_page + ((place - part.first_slot) >> shift)"),
    Fault("slot_in_the_page", BLOCK, "(place & (p.page_tokens - 1))",
          "((place - part.first_slot) & (p.page_tokens - 1))"),
    Fault("kv_head", BLOCK,
          "return kv_head * HeadsPerKv() + first_head + row % heads;",
          "return kv_head + first_head + row % heads * "
          "static_cast<int>(p.num_kv_heads);"),
    Fault("rows_that_do_not_exist", BLOCK,
          "return QueryOf(row) < static_cast<int>(item.num_rows) &&",
          "return QueryOf(row) <= static_cast<int>(item.num_rows) &&"),
    Fault("alibi_sign", KERNEL,
          "x += slope * static_cast<float>(distance + token);",
          "x -= slope * static_cast<float>(distance + token);"),
    Fault("distance_not_limited", KERNEL,
          "max(-p.bias_reach, min(p.bias_reach, distance + token))",
          "max(-p.bias_reach, distance + token)"),
    Fault("interleaved_pairs", BLOCK, "if (p.rope_interleaved) {",
          "if (!p.rope_interleaved) {"),
    Fault("log_sum_forgets_the_sum", STORE, "maximum + log2f(sum)", "maximum"),
    Fault("merge_takes_one_state_less", MERGE,
          "  for (uint32_t i = 0; i < row.num_states; ++i) {\n"
          "    const float weight",
          "  for (uint32_t i = 1; i < row.num_states; ++i) {\n"
          "    const float weight", rebuild=("merge",)),
    Fault("shared_rows_take_the_first_frame", PLAN,
          "ViewOf(row.group, slot).position_offset;",
          "ViewOf(rows[0].group, slot0).position_offset;", rebuild=("plan",)),
    Fault("stream_does_not_wait", CASE,
          "  cudaStreamWaitEvent(compute, copied, 0);\n", "",
          rebuild=("attention_case",)),
    Fault("event_not_recorded", CASE,
          "  cudaEventRecord(copied, copy);\n", "",
          rebuild=("attention_case",)),
    Fault("merge_on_another_stream", LAUNCH,
          "LaunchAttentionMerge(params, stream)",
          "LaunchAttentionMerge(params, nullptr)", rebuild=("launch",)),
    Fault("keys_scaled_twice", BLOCK, "1.0f / p.rope_factor", "1.0f"),
    Fault("surplus_blocks", KERNEL,
          "if (blockIdx.x >= (large ? header.num_large_items : "
          "header.num_small_items)) {",
          "if (blockIdx.x > (large ? header.num_large_items : "
          "header.num_small_items)) {"),
    # Only an address sanitizer sees it: what is read there is not used.
    Fault("page_table_read_past_its_end", BLOCK,
          "static_cast<uint32_t>(valid ? at.token + token : at.token);",
          "static_cast<uint32_t>(at.token + token);", mode="asan"),
    # What a step read may have been handed to another module while it ran.
    Fault("generation_unchecked", STEP,
          "  if (!job->ArrivalsVerified() || !job->modules.Valid()) {\n"
          "    ++discarded_;\n",
          "  if (!job->ArrivalsVerified()) {\n    ++discarded_;\n",
          mode="serving", rebuild=()),
    Fault("progress_not_waited_for", BACKEND,
          "  arrivals_.AwaitLayers(index + 1);\n", "", mode="engine",
          rebuild=()),
    Fault("progress_waited_for_a_layer_late", BACKEND,
          "arrivals_.AwaitLayers(index + 1);", "arrivals_.AwaitLayers(index);",
          mode="engine", rebuild=()),
    Fault("graph_of_a_pass_that_waits", BACKEND,
          "options_.graphs && arrivals_.empty() &&", "options_.graphs &&",
          mode="engine", rebuild=()),
]
