#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

struct TensorShape {
  uint64_t rows = 0;  // 1: a vector
  uint64_t cols = 0;
};

// Which rows (of a vector: elements) of a file's tensor a role is.
struct TensorPart {
  uint64_t first = 0;
  uint64_t count = 0;  // 0: all of them
  // Runs of `run` of them, one every `run_stride`; 0: one piece.
  uint64_t run = 0;
  uint64_t run_stride = 0;
};

// A tensor that a model's files hold, and the role it, or a part of it, has.
struct TensorRule {
  TensorRole role;
  std::string name;   // in the file; "{}" stands for the layer
  TensorShape shape;  // as the role's, before a part is taken
  TensorPart part = {};
  bool optional = false;
  bool transposed = false;  // in the file [cols, rows]
};

// All that sets one model apart but for its weights: what a family makes of a
// file's metadata.
struct ModelLayout {
  ModelConfig config;
  std::vector<TensorRule> tensors;
  // Tensors that may be there and that nothing needs: tables of constants,
  // copies. By the ends of their names.
  std::vector<std::string> ignored_endings;
  // With which the names in `tensors` begin and which a file may leave out.
  std::string optional_prefix;
};

// The tensors of an opened file, or of several.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual std::vector<std::string_view> Names() const = 0;
  // The named tensor, whole, of this shape; InvalidArgument when it has another
  // one or a type that cannot be computed with. REQUIRES: one of Names().
  virtual absl::StatusOr<TensorView> Locate(std::string_view name,
                                            TensorShape shape) const = 0;
};

// Where each role of a model lies. Immutable and thread-safe.
class TensorTable {
 public:
  TensorTable() = default;  // of a file opened for its vocabulary only

  // InvalidArgument, with the tensor's name, when one is missing, has another
  // shape or type, or is left over: computing without it would be wrong.
  static absl::StatusOr<TensorTable> Build(const ModelLayout& layout,
                                           const TensorSource& source);

  // NotFound with the name looked for.
  absl::StatusOr<TensorView> Find(TensorRole role, uint32_t layer) const;
  // The tensors of the file that have a role, whole, by name: what a
  // fingerprint covers.
  const std::map<std::string, TensorView>& whole() const { return whole_; }

 private:
  absl::Status Add(const TensorRule& rule, uint32_t layer, std::string name,
                   const TensorSource& source);

  std::map<std::string, TensorView> whole_;
  std::map<std::pair<TensorRole, uint32_t>, TensorView> by_role_;
  std::map<TensorRole, std::string> names_;  // of the rules, for messages
};

// "blk.{}.attn_q.weight" of a layer.
std::string TensorName(std::string_view pattern, uint32_t layer);
bool IsPerLayer(std::string_view pattern);

// The shapes of a model's matrices by role; {0, 0} for those that a config does
// not tell (the tables of tokens' positions).
TensorShape ShapeOf(const ModelConfig& config, TensorRole role);

// Adds rules, each with the shape that its role has.
class RuleWriter {
 public:
  explicit RuleWriter(ModelLayout* layout) : layout_(*layout) {}

  // Valid until the next rule is added.
  TensorRule& Add(TensorRole role, std::string_view name);
  TensorRule& last() { return layout_.tensors.back(); }
  // name.weight and, when `biased`, name.bias.
  void AddLinear(TensorRole role, std::string_view name, bool biased);
  // A matrix and its bias that hold several roles, each its part. Every part's
  // `count` is the role's rows.
  struct Part {
    TensorRole role;
    uint64_t first;
    uint64_t run = 0;
    uint64_t run_stride = 0;
  };
  void AddFused(const std::vector<Part>& parts, std::string_view name,
                bool biased, bool transposed = false);

  // All of q, all of k, all of v.
  void AddStackedQkv(std::string_view name, bool biased,
                     bool transposed = false);

 private:
  ModelLayout& layout_;
};

// The role of a matrix's or norm's bias. REQUIRES: there is one.
TensorRole BiasOf(TensorRole role);

}  // namespace promptcache::worker
