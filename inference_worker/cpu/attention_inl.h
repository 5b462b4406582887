#pragma once

// Attention of some query rows over some segments (isa_kernels.h). A tile of
// keys is unpacked to fp32 once, transposed to [head_dim][kTileTokens], its
// values to [kTileTokens][head_dim]; all packed rows then use it from the
// first-level cache. For one packed row the order of summation is: a logit over
// head_dim in order; a softmax online over the tiles of a segment; segments
// merged in order.

#include "inference_worker/cpu/elementwise_inl.h"
#include "inference_worker/cpu/softmax_inl.h"

namespace promptcache::worker::cpu {

// No matrix unit: every product is one of vectors.
struct NoProducts {
  static constexpr bool kUsed = false;
  NoProducts(const AttentionTask&, float*) {}
};

// With Products (attention_amx_inl.h), rows that see a tile of another span, or
// a whole tile of their own, have it multiplied there; a tile of its own that
// a row sees in part is left to vectors. So it is the row that decides, not
// what it is computed with.
template <class S, class Products = NoProducts>
class Attention {
 public:
  static void Attend(const AttentionTask& task) { Attention(task).Run(); }

  static void MergeStates(const AttentionTask& task) {
    const size_t packed = task.num_rows * size_t{task.heads_per_kv};
    const size_t stride = kStateHeader + task.head_dim;
    for (size_t row = 0; row < packed; ++row) {
      float* const into = task.segment_states[0] + row * stride;
      for (uint32_t s = 1; s < task.num_segments; ++s) {
        State::Merge(into, task.segment_states[s] + row * stride,
                     task.head_dim);
      }
      WriteOutput(task, row, into);
    }
  }

 private:
  using E = Elementwise<S>;
  using State = SoftmaxState<S>;
  using F = typename S::F;
  static constexpr uint32_t kLanes = S::kLanes;
  // Vectors of a row's logits (or of its output) held at a time.
  static constexpr int kVectors = S::kAttentionVectors;
  static constexpr int kRows = S::kAttentionRows;
  static_assert(kTileTokens % (kVectors * kLanes) == 0);
  static_assert(kRows <= 16);

  explicit Attention(const AttentionTask& task)
      : task_(task),
        packed_rows_(task.num_rows * task.heads_per_kv),
        state_stride_(kStateHeader + task.head_dim),
        keys_(reinterpret_cast<float*>(task.scratch)),
        values_(keys_ + kTileTokens * kMaxHeadDim),
        queries_(values_ + kTileTokens * kMaxHeadDim),
        running_(queries_ + kMaxPackedRows * kMaxHeadDim),
        segment_(running_ + kMaxPackedRows * (kStateHeader + kMaxHeadDim)),
        weights_(segment_ + kMaxPackedRows * (kStateHeader + kMaxHeadDim)),
        products_(task, weights_ + 16 * kTileTokens) {}

  void Run() {
    if constexpr (Products::kUsed) Products::Configure();
    RunSegments();
    if constexpr (Products::kUsed) Products::Release();
    if (task_.states != nullptr) return;
    for (uint32_t row = 0; row < packed_rows_; ++row) {
      WriteOutput(task_, row, running_ + row * state_stride_);
    }
  }

  void RunSegments() {
    if (task_.num_segments == 0) Clear(running_);
    for (uint32_t s = 0; s < task_.num_segments; ++s) {
      const AttentionSegment& segment = task_.segments[s];
      EnterFrame(*segment.view);
      if (s + 1 < task_.num_segments) {
        PrefetchAngles(0, task_.segments[s + 1].view->position_offset);
      }
      float* const state = task_.states != nullptr
                               ? task_.states + s * packed_rows_ * state_stride_
                               : (s == 0 ? running_ : segment_);
      Clear(state);
      RunSegment(segment, state);
      if (task_.states == nullptr && s > 0) {
        for (uint32_t row = 0; row < packed_rows_; ++row) {
          State::Merge(running_ + row * state_stride_,
                       state + row * state_stride_, task_.head_dim);
        }
      }
    }
  }

  // Own tokens are counted from the span's first one.
  uint32_t VisibleTokens(const AttentionSegment& segment, uint32_t row) const {
    if (!segment.own) return segment.num_tokens;
    const uint32_t limit = task_.own_limit + row / task_.heads_per_kv;
    if (limit <= segment.first_token) return 0;
    const uint32_t seen = limit - segment.first_token;
    return seen < segment.num_tokens ? seen : segment.num_tokens;
  }

  // Tokens of the segment that the row's window does not reach.
  uint32_t HiddenTokens(const AttentionSegment& segment, uint32_t row) const {
    const int64_t hidden =
        task_.window_begin + row / task_.heads_per_kv - segment.tokens_before;
    if (hidden <= 0) return 0;
    return hidden < segment.num_tokens ? static_cast<uint32_t>(hidden)
                                       : segment.num_tokens;
  }

  // The first row whose window begins after token `first` of the segment.
  uint32_t FirstHidingRow(const AttentionSegment& segment,
                          uint32_t first) const {
    const int64_t token =
        segment.tokens_before + first + 1 - task_.window_begin;
    if (token <= 0) return 0;
    return token < task_.num_rows
               ? static_cast<uint32_t>(token) * task_.heads_per_kv
               : packed_rows_;
  }

  const float* QueryOf(uint32_t token) const {
    return task_.rows != nullptr ? task_.rows[token].queries
                                 : task_.queries + token * task_.query_stride;
  }
  int32_t PositionOf(uint32_t token) const {
    return task_.rows != nullptr ? task_.rows[token].position
                                 : task_.position + static_cast<int32_t>(token);
  }

  // From here on queries are wanted in the view's frame.
  void EnterFrame(const KvView& view) {
    if (entered_ && frame_ == view.position_offset) return;
    entered_ = true;
    frame_ = view.position_offset;
    rotated_tokens_ = 0;
    product_tokens_ = 0;
  }

  // Tokens that rows [0, end) are of.
  uint32_t TokensOf(uint32_t end) const {
    return (end + task_.heads_per_kv - 1) / task_.heads_per_kv;
  }

  // Rotates the queries of packed rows [0, end) that are not yet: just before
  // they are used, while what the next ones need is on its way, so that little
  // is waited for.
  void RotateRows(uint32_t end) {
    const uint32_t tokens = TokensOf(end);
    if (rotated_tokens_ >= tokens) return;
    const size_t token_floats = size_t{task_.heads_per_kv} * task_.head_dim;
    const uint32_t ahead = tokens - rotated_tokens_;
    for (; rotated_tokens_ < tokens; ++rotated_tokens_) {
      const uint32_t token = rotated_tokens_;
      if (token + ahead < task_.num_rows)
        PrefetchQueries</*kToQueries=*/true>(token + ahead);
      E::Rotate(QueryOf(token), task_.rope, PositionOf(token) - frame_,
                task_.head_dim, task_.heads_per_kv, QueryScale(),
                queries_ + token * token_floats);
    }
  }

  // Logits in base 2.
  float QueryScale() const { return task_.scale * 1.44269504f; }

  // The same for Products: straight to where they are multiplied, and a tile of
  // rows is, while it lies in the first-level cache. Where Products cannot,
  // which depends on the model alone, all rows at once.
  void RotateForProducts(uint32_t end) {
    const uint32_t tokens = TokensOf(end);
    if (product_tokens_ >= tokens) return;
    if (!Products::Rotates(task_.rope, task_.head_dim)) {
      RotateRows(packed_rows_);
      products_.SetQueries(queries_, packed_rows_);
      product_tokens_ = task_.num_rows;
      return;
    }
    const uint32_t ahead = tokens - product_tokens_;
    for (; product_tokens_ < tokens; ++product_tokens_) {
      const uint32_t token = product_tokens_;
      if (token + ahead < task_.num_rows)
        PrefetchQueries</*kToQueries=*/false>(token + ahead);
      const auto turn =
          E::TurnTo(task_.rope, PositionOf(token) - frame_, QueryScale());
      products_.SetRotatedQueries(
          turn, QueryOf(token), token * task_.heads_per_kv, task_.heads_per_kv);
    }
  }

  // What rotating them reads, and where in queries_ they go, if they do.
  template <bool kToQueries>
  void PrefetchQueries(uint32_t token) const {
    const uint32_t floats = task_.heads_per_kv * task_.head_dim;
    const float* const query = QueryOf(token);
    for (uint32_t at = 0; at < floats; at += 16) {
      __builtin_prefetch(query + at);
      if constexpr (kToQueries) {
        __builtin_prefetch(queries_ + token * size_t{floats} + at, 1);
      }
    }
    PrefetchAngles(token, frame_);
  }

  void PrefetchAngles(uint32_t token, int32_t frame) const {
    if (task_.rope.table == nullptr) return;
    const int32_t distance = PositionOf(token) - frame;
    const auto row = static_cast<size_t>(distance < 0 ? -distance : distance);
    const uint32_t floats = 2 * task_.rope.num_pairs;
    const float* const angles = task_.rope.table + row * floats;
    for (uint32_t at = 0; at < floats; at += 16) {
      __builtin_prefetch(angles + at);
    }
  }

  void Clear(float* state) const {
    for (uint32_t row = 0; row < packed_rows_; ++row) {
      float* const s = state + row * state_stride_;
      std::memset(s, 0, state_stride_ * sizeof(float));
      s[0] = -__builtin_inff();
    }
  }

  void RunSegment(const AttentionSegment& segment, float* state) {
    const uint32_t seen = VisibleTokens(segment, packed_rows_ - 1);
    const KvView& view = *segment.view;
    uint32_t first = HiddenTokens(segment, 0) / kTileTokens * kTileTokens;
    for (; first < seen; first += kTileTokens) {
      const uint32_t left = seen - first;
      const uint32_t tokens = left < kTileTokens ? left : kTileTokens;
      FindTokens(view, segment.first_token + first, tokens);
      tile_position_ = view.position_offset + view.local_position +
                       static_cast<int32_t>(segment.first_token + first);
      const uint32_t hiding = FirstHidingRow(segment, first);
      uint32_t whole = FirstWholeRow(segment, first);
      if (whole > hiding) whole = hiding;
      if (whole > 0) VectorTile(segment, first, tokens, whole, state);
      if constexpr (Products::kUsed) {
        if (whole < hiding) ProductTile(tokens, whole, hiding, state);
      }
      if (hiding < packed_rows_) {
        WindowTile(segment, first, tokens, hiding, state);
      }
    }
  }

  // The first row from which on rows have this tile multiplied by Products.
  uint32_t FirstWholeRow(const AttentionSegment& segment,
                         uint32_t first) const {
    if (!Products::kUsed) return packed_rows_;
    if (!segment.own) return 0;
    const uint32_t end = segment.first_token + first + kTileTokens;
    if (end <= task_.own_limit) return 0;
    const uint32_t row = (end - task_.own_limit) * task_.heads_per_kv;
    return row < packed_rows_ ? row : packed_rows_;
  }

  // Rows [0, end) over a tile, by vectors.
  void VectorTile(const AttentionSegment& segment, uint32_t first,
                  uint32_t tokens, uint32_t end, float* state) {
    bool unpacked = false;
    for (uint32_t row = 0; row < end; row += kRows) {
      uint32_t limits[kRows];
      const uint32_t rows = end - row < kRows ? end - row : kRows;
      for (uint32_t r = 0; r < rows; ++r) {
        const uint32_t visible = VisibleTokens(segment, row + r);
        const uint32_t here = visible > first ? visible - first : 0;
        limits[r] = here < tokens ? here : tokens;
      }
      if (limits[rows - 1] == 0) continue;
      if (!unpacked) Unpack(tokens);
      unpacked = true;
      RotateRows(row + rows);
      Rows<kRows>(rows, row, limits, state + row * state_stride_);
    }
  }

  // Rows from `begin` on over a tile whose first tokens are hidden from them.
  void WindowTile(const AttentionSegment& segment, uint32_t first,
                  uint32_t tokens, uint32_t begin, float* state) {
    bool unpacked = false;
    for (uint32_t row = begin; row < packed_rows_; ++row) {
      const uint32_t from = HiddenTokens(segment, row) - first;
      const uint32_t visible = VisibleTokens(segment, row);
      uint32_t to = visible > first ? visible - first : 0;
      if (to > tokens) to = tokens;
      if (from >= to) continue;
      if (!unpacked) Unpack(tokens);
      unpacked = true;
      RotateRows(row + 1);
      WindowRow(row, from, to, state + row * state_stride_);
    }
  }

  // One row over tokens [from, to) of the tile.
  void WindowRow(uint32_t row, uint32_t from, uint32_t to, float* state) {
    Logits<1>(queries_ + row * size_t{task_.head_dim}, to);
    AddBias(row, to, weights_);
    const float factor = State::Update(weights_ + from, to - from, state);
    float* const sums = state + kStateHeader;
    for (uint32_t d = 0; d < task_.head_dim; d += kLanes) {
      S::Store(sums + d, S::Mul(S::Load(sums + d), S::Set1(factor)));
      AddTokens<1, 1>(from, to, d, weights_, sums);
    }
  }

  // To the first `tokens` logits of a row over the tile.
  void AddBias(uint32_t row, uint32_t tokens, float* logits) const {
    if (task_.alibi_slopes != nullptr) AddAlibi(row, tokens, logits);
    if (task_.bias != nullptr) AddTableBias(row, tokens, logits);
  }

  // From the row's token to the tile's first one.
  int32_t TileDistance(uint32_t row) const {
    return tile_position_ - PositionOf(row / task_.heads_per_kv);
  }

  void AddTableBias(uint32_t row, uint32_t tokens, float* logits) const {
    constexpr auto kTile = static_cast<int32_t>(kTileTokens);
    // Beyond the reach all entries are the same.
    int32_t distance = TileDistance(row);
    const int32_t reach = task_.bias_reach;
    if (distance < -reach - kTile) distance = -reach - kTile;
    if (distance > reach) distance = reach;
    const float* const bias = task_.bias +
                              row % task_.heads_per_kv * task_.bias_stride +
                              (distance + reach + kTile);
    for (uint32_t t = 0; t < tokens; t += kLanes) {
      S::Store(logits + t, S::Add(S::Load(logits + t), S::Load(bias + t)));
    }
  }

  void AddAlibi(uint32_t row, uint32_t tokens, float* logits) const {
    alignas(64) static constexpr float kLane[16] = {
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    // Logits are in base 2.
    const F slope =
        S::Set1(task_.alibi_slopes[row % task_.heads_per_kv] * 1.44269504f);
    F distances =
        S::Add(S::Set1(static_cast<float>(TileDistance(row))), S::Load(kLane));
    for (uint32_t t = 0; t < tokens; t += kLanes) {
      S::Store(logits + t, S::Fma(slope, distances, S::Load(logits + t)));
      distances = S::Add(distances, S::Set1(static_cast<float>(kLanes)));
    }
  }

  // Rows [begin, end) over a tile of which all see `tokens`.
  void ProductTile(uint32_t tokens, uint32_t begin, uint32_t end,
                   float* state) {
    constexpr uint32_t kTile = Products::kRows;
    products_.SetTile(task_, tokens_, tokens);
    for (uint32_t tile = begin / kTile; tile * kTile < end; ++tile) {
      const uint32_t base = tile * kTile;
      const uint32_t left = end - base;
      const uint32_t last = left < kTile ? left : kTile;
      const uint32_t first = begin > base ? begin - base : 0;
      RotateForProducts(base + last);
      float* const logits = products_.Logits(tile);
      float factors[kTile];
      for (uint32_t r = first; r < last; ++r) {
        AddBias(base + r, tokens, logits + r * kTileTokens);
        factors[r] = State::Update(logits + r * kTileTokens, tokens,
                                   state + (base + r) * state_stride_);
        products_.SetWeights(r, tokens);
      }
      const float* const sums = products_.Sums(tokens);
      for (uint32_t r = first; r < last; ++r) {
        AddSums(sums + r * size_t{task_.head_dim}, factors[r],
                state + (base + r) * state_stride_ + kStateHeader);
      }
    }
  }

  void AddSums(const float* sums, float factor, float* out) const {
    const F wide = S::Set1(factor);
    for (uint32_t d = 0; d < task_.head_dim; d += kLanes) {
      S::Store(out + d, S::Fma(S::Load(out + d), wide, S::Load(sums + d)));
    }
  }

  // Few rows: waiting for memory is most of the work.
  void Prefetch(const std::byte* row) const {
    for (uint32_t at = 0; at < task_.head_dim * sizeof(uint16_t); at += 64) {
      __builtin_prefetch(row + task_.key_offset + at, 0, 2);
      __builtin_prefetch(row + task_.value_offset + at, 0, 2);
    }
  }

  void FindTokens(const KvView& view, uint32_t first, uint32_t tokens) {
    if (packed_rows_ <= 16) {
      ForTokens(view, first + kTileTokens, kTileTokens,
                [this](uint32_t, const std::byte* row) { Prefetch(row); });
    }
    ForTokens(view, first, tokens,
              [this](uint32_t t, const std::byte* row) { tokens_[t] = row; });
  }

  // Keys and values of tokens_ as fp32. Tokens that are not there are zeros,
  // never memory beyond the view.
  void Unpack(uint32_t tokens) {
    UnpackKeys(tokens_, tokens);
    for (uint32_t t = 0; t < tokens; ++t) {
      const auto* v =
          reinterpret_cast<const uint16_t*>(tokens_[t] + task_.value_offset);
      float* const out = values_ + t * size_t{task_.head_dim};
      for (uint32_t d = 0; d < task_.head_dim; d += kLanes) {
        S::Store(out + d, S::LoadBf16(v + d));
      }
    }
  }

  // body(t, address of the token in its page) for tokens first + t of the view,
  // t < tokens, as far as there are any.
  template <class Body>
  void ForTokens(const KvView& view, uint32_t first, uint32_t tokens,
                 Body body) const {
    uint32_t page = (view.first_token + first) / task_.page_tokens;
    uint32_t slot = (view.first_token + first) % task_.page_tokens;
    const size_t token_bytes = task_.head_dim * sizeof(uint16_t);
    for (uint32_t t = 0; t < tokens && first + t < view.num_tokens; ++t) {
      body(t, view.pages[page] + slot * token_bytes);
      if (++slot == task_.page_tokens) {
        slot = 0;
        ++page;
      }
    }
  }

  void UnpackKeys(const std::byte* const* rows, uint32_t tokens) {
    alignas(64) static constexpr uint16_t kNoKey[kMaxHeadDim] = {};
    const uint32_t dim_pairs = task_.head_dim / 2;
    for (uint32_t t = 0; t < tokens; t += kLanes) {
      const uint16_t* keys[kLanes];
      for (uint32_t j = 0; j < kLanes; ++j) {
        keys[j] = t + j < tokens ? reinterpret_cast<const uint16_t*>(
                                       rows[t + j] + task_.key_offset)
                                 : kNoKey;
      }
      for (uint32_t pair = 0; pair < dim_pairs; pair += kLanes) {
        const uint32_t left = dim_pairs - pair;
        const uint32_t count = left < kLanes ? left : kLanes;
        typename S::Pairs columns[kLanes];
        S::TransposePairs(keys, 2 * pair, count, columns);
        float* out = keys_ + 2 * pair * kTileTokens + t;
        for (uint32_t j = 0; j < count; ++j) {
          S::Store(out, S::Low(columns[j]));
          S::Store(out + kTileTokens, S::High(columns[j]));
          out += 2 * kTileTokens;
        }
      }
    }
  }

  template <int kCount>
  void Rows(uint32_t rows, uint32_t row, const uint32_t* limits,
            float* states) {
    if constexpr (kCount > 1) {
      if (rows < kCount) {
        return Rows<kCount - 1>(rows, row, limits, states);
      }
    }
    Logits<kCount>(queries_ + row * size_t{task_.head_dim}, limits[kCount - 1]);
    bool rescale = false;
    float factors[kCount];
    for (int r = 0; r < kCount; ++r) {
      AddBias(row + static_cast<uint32_t>(r), limits[r],
              weights_ + r * kTileTokens);
      factors[r] = State::Update(weights_ + r * kTileTokens, limits[r],
                                 states + r * state_stride_);
      rescale |= factors[r] != 1.0f;
    }
    if (rescale) {
      for (int r = 0; r < kCount; ++r) {
        float* const out = states + r * state_stride_ + kStateHeader;
        const F factor = S::Set1(factors[r]);
        for (uint32_t d = 0; d < task_.head_dim; d += kLanes) {
          S::Store(out + d, S::Mul(S::Load(out + d), factor));
        }
      }
    }
    AddValues<kCount>(limits, states + kStateHeader);
  }

  // weights_[r][t] = q_r . k_t for t < `tokens`, rounded up to a step.
  template <int kCount>
  void Logits(const float* queries, uint32_t tokens) {
    const size_t dim = task_.head_dim;
    for (uint32_t t = 0; t < tokens; t += kVectors * kLanes) {
      F sums[kCount][kVectors];
      PROMPTCACHE_UNROLL
      for (int r = 0; r < kCount; ++r) {
        PROMPTCACHE_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[r][v] = S::Zero();
      }
      const float* keys = keys_ + t;
      for (size_t d = 0; d < dim; ++d, keys += kTileTokens) {
        F k[kVectors];
        PROMPTCACHE_UNROLL
        for (int v = 0; v < kVectors; ++v) k[v] = S::Load(keys + v * kLanes);
        PROMPTCACHE_UNROLL
        for (int r = 0; r < kCount; ++r) {
          const F q = S::Set1(queries[r * dim + d]);
          PROMPTCACHE_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            sums[r][v] = S::Fma(q, k[v], sums[r][v]);
          }
        }
      }
      PROMPTCACHE_UNROLL
      for (int r = 0; r < kCount; ++r) {
        PROMPTCACHE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          S::Store(weights_ + r * kTileTokens + t + v * kLanes, sums[r][v]);
        }
      }
    }
  }

  // Adds the weighted values to each row's sums: together as far as all rows
  // see, then each row alone. A token that a row does not see is not
  // multiplied by zero but left out.
  template <int kCount>
  void AddValues(const uint32_t* limits, float* sums) {
    const uint32_t together = limits[0];
    uint32_t d = 0;
    for (; d + kVectors * kLanes <= task_.head_dim; d += kVectors * kLanes) {
      AddDims<kCount, kVectors>(limits, together, d, sums);
    }
    for (; d < task_.head_dim; d += kLanes) {
      AddDims<kCount, 1>(limits, together, d, sums);
    }
  }

  template <int kCount, int kWide>
  void AddDims(const uint32_t* limits, uint32_t together, uint32_t d,
               float* sums) {
    AddTokens<kCount, kWide>(0, together, d, weights_, sums);
    for (int r = 0; r < kCount; ++r) {
      if (limits[r] == together) continue;
      AddTokens<1, kWide>(together, limits[r], d, weights_ + r * kTileTokens,
                          sums + r * state_stride_);
    }
  }

  template <int kCount, int kWide>
  void AddTokens(uint32_t first, uint32_t last, uint32_t d,
                 const float* weights, float* out) {
    if (first >= last) return;
    const size_t stride = state_stride_;
    const size_t dim = task_.head_dim;
    F sums[kCount][kWide];
    PROMPTCACHE_UNROLL
    for (int r = 0; r < kCount; ++r) {
      PROMPTCACHE_UNROLL
      for (int v = 0; v < kWide; ++v) {
        sums[r][v] = S::Load(out + r * stride + d + v * kLanes);
      }
    }
    const float* values = values_ + first * dim + d;
    for (uint32_t t = first; t < last; ++t, values += dim) {
      F x[kWide];
      PROMPTCACHE_UNROLL
      for (int v = 0; v < kWide; ++v) x[v] = S::Load(values + v * kLanes);
      PROMPTCACHE_UNROLL
      for (int r = 0; r < kCount; ++r) {
        const F weight = S::Set1(weights[r * kTileTokens + t]);
        PROMPTCACHE_UNROLL
        for (int v = 0; v < kWide; ++v) {
          sums[r][v] = S::Fma(weight, x[v], sums[r][v]);
        }
      }
    }
    PROMPTCACHE_UNROLL
    for (int r = 0; r < kCount; ++r) {
      PROMPTCACHE_UNROLL
      for (int v = 0; v < kWide; ++v) {
        S::Store(out + r * stride + d + v * kLanes, sums[r][v]);
      }
    }
  }

  static void WriteOutput(const AttentionTask& task, size_t row,
                          const float* state) {
    float* const out = task.out + row / task.heads_per_kv * task.out_stride +
                       row % task.heads_per_kv * task.head_dim;
    const F inverse = S::Set1(state[1] == 0.0f ? 0.0f : 1.0f / state[1]);
    for (uint32_t d = 0; d < task.head_dim; d += kLanes) {
      S::Store(out + d, S::Mul(S::Load(state + kStateHeader + d), inverse));
    }
  }

  const AttentionTask& task_;
  const uint32_t packed_rows_;
  const size_t state_stride_;
  float* const keys_;     // [head_dim][kTileTokens]
  float* const values_;   // [kTileTokens][head_dim]
  float* const queries_;  // [packed row][head_dim], rotated into frame_
  float* const running_;  // a state a packed row
  float* const segment_;  // likewise
  float* const weights_;  // [kRows][kTileTokens]
  Products products_;
  const std::byte* tokens_[kTileTokens];  // of the tile, in their pages
  bool entered_ = false;
  int32_t frame_ = 0;
  uint32_t rotated_tokens_ = 0;  // of the task's first ones, into frame_
  uint32_t product_tokens_ = 0;  // likewise, for Products
  int32_t tile_position_ = 0;    // of the tile's first token, in the plan
};

template <class S, class Products = NoProducts>
constexpr void FillCommon(IsaKernels* kernels) {
  kernels->attend = Attention<S, Products>::Attend;
  kernels->merge_states = Attention<S, Products>::MergeStates;
  kernels->rms_norm = Elementwise<S>::RmsNorm;
  kernels->layer_norm = Elementwise<S>::LayerNorm;
  kernels->activate = Elementwise<S>::Activate;
  kernels->add = Elementwise<S>::Add;
  kernels->scale = Elementwise<S>::Scale;
  kernels->to_bf16 = Elementwise<S>::ToBf16;
  kernels->rotate_to_bf16 = Elementwise<S>::RotateToBf16;
}

}  // namespace promptcache::worker::cpu
