#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/chat_template.h"
#include "common/tokenizer.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/cache/registry_client.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/compute_device.h"
#include "inference_worker/engine/families/reuse.h"
#include "inference_worker/engine/kv_memory.h"
#include "inference_worker/engine/private_pages.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/serving/prompt_compiler.h"
#include "inference_worker/serving/scheduler.h"

namespace promptcache::worker {

// What a worker says of its model.
struct ModelDescription {
  std::string name;
  std::string architecture;
  std::string path;
  uint32_t context_length = 0;
  uint32_t vocab_size = 0;
  uint32_t num_layers = 0;
  std::string numerics;
  std::string kernels;
  std::string chat_template;
  std::string fingerprint;
  uint32_t num_threads = 0;
};

// Everything of a worker but its server: the model with its tokenizer and its
// pages, the daemon's clients, the compiler and the scheduler, put together in
// the order in which they need each other. Thread-safe once made.
class Worker {
 public:
  struct Options {
    std::string model;              // a GGUF file or a folder
    std::string daemon_socket;      // "": without a cache
    std::string fingerprint_cache;  // "": hashed at every start
    std::string chat_template;      // "": from the model file
    std::string kernels = "auto";
    std::string numerics = "auto";  // engine/numerics.h
    uint32_t num_threads = 0;       // 0: all cores
    uint64_t tail_bytes = uint64_t{512} << 20;
    // Where the model runs and its pages lie, which the cache's device tier
    // must be on too. Must outlive the worker.
    ComputeDevice* device = nullptr;
    bool batch_invariant = false;  // of a GPU
    absl::Duration acquire_timeout = absl::Seconds(1);
    pml::Limits limits;
    Scheduler::Options scheduler;
    // While weights are packed: 0..1. May be empty.
    std::function<void(double)> progress;

    // But for the device, which is opened when all else is right.
    absl::Status Validate() const;
    // One flag a line, for the log.
    std::string ToString() const;
  };
  static absl::StatusOr<std::unique_ptr<Worker>> Create(const Options& options);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  PromptCompiler* compiler() { return compiler_.get(); }
  Scheduler* scheduler() { return scheduler_.get(); }
  RegistryClient* registry() { return registry_.get(); }
  // Null: without one, or none of this model's states may be kept.
  CacheClient* cache() { return no_reuse_.empty() ? cache_.get() : nullptr; }
  const ModelDescription& description() const { return description_; }
  bool daemon_attached() const {
    return cache_ != nullptr && cache_->attached();
  }

 private:
  Worker() = default;
  absl::StatusOr<std::unique_ptr<ModelFile>> LoadModel(const Options& options);
  // Why states must not be reused; "": they may be.
  absl::StatusOr<std::string> ReuseRefusal() const;
  absl::Status Connect(const Options& options);

  ModelDescription description_;
  ChatTemplate chat_template_;
  Digest model_fingerprint_;
  ReuseRule reuse_rule_ = ReuseRule::kAnywhere;
  std::string no_reuse_;  // of ReuseRefusal
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<KvMemory> memory_;
  std::unique_ptr<PrivatePages> pages_;
  std::unique_ptr<RegistryClient> registry_;
  std::unique_ptr<SchemaSource> schemas_;
  std::unique_ptr<PromptCompiler> compiler_;
  std::unique_ptr<CacheClient> cache_;
  std::unique_ptr<Scheduler> scheduler_;
};

}  // namespace promptcache::worker
