// Streams, events, graphs and launches of the stand-in. Lazy by default: an
// operation runs only when something waits for it, so a missing
// synchronisation reads stale data instead of passing by luck.
#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <set>
#include <unordered_map>
#include <utility>

#include "emulator_engine.h"
#include "emulator_grid.h"
#include "fake_cuda.h"

struct CUstream_st {
  std::shared_ptr<promptcache::gpu::fake::Stream> stream;
};

namespace promptcache::gpu::fake {
namespace {

// What an event knows of itself; its stream's queue may outlive the handle.
struct EventState {
  std::shared_ptr<Stream> stream;  // null: never recorded
  uint64_t number = 0;
  std::shared_ptr<Capture> capture;
  bool timed = true;
  double milliseconds = 0;
};

}  // namespace
}  // namespace promptcache::gpu::fake

struct CUevent_st {
  std::shared_ptr<promptcache::gpu::fake::EventState> state;
};
struct CUgraph_st {
  std::vector<promptcache::gpu::fake::GraphOperation> operations;
};
struct CUgraphExec_st {
  // Shared with launches that have not run yet.
  std::shared_ptr<std::vector<promptcache::gpu::fake::GraphOperation>>
      operations;
};

namespace promptcache::gpu::fake {
namespace {

std::condition_variable& StreamIdle() {
  static auto* const kIdle = new std::condition_variable;
  return *kIdle;
}

std::set<std::shared_ptr<Stream>>& AllStreams() {
  static auto* const kStreams = new std::set<std::shared_ptr<Stream>>;
  return *kStreams;
}

// One a device.
std::shared_ptr<Stream> NullStream() {
  static auto* const kStreams = new std::map<int, std::shared_ptr<Stream>>;
  std::shared_ptr<Stream>& stream = (*kStreams)[CurrentDevice()];
  if (stream == nullptr) {
    stream = std::make_shared<Stream>();
    stream->device = CurrentDevice();
    AllStreams().insert(stream);
  }
  return stream;
}

bool IsNull(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy ||
         stream == cudaStreamPerThread;
}

// REQUIRES: mutex held.
std::shared_ptr<Stream> StreamOf(cudaStream_t stream) {
  return IsNull(stream) ? NullStream() : stream->stream;
}

// Captures of this thread that forbid what would wait.
thread_local int strict_captures = 0;

std::unordered_map<const void*, size_t>& SharedLimits() {
  static auto* const kLimits = new std::unordered_map<const void*, size_t>;
  return *kLimits;
}

double Now() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Drain(bool blocking_only, int device) {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard lock(GlobalMutex());
    for (const auto& stream : AllStreams()) {
      if (blocking_only && !(stream->blocking && stream->device == device)) {
        continue;
      }
      streams.push_back(stream);
    }
  }
  for (const auto& stream : streams) RunUntil(stream, UINT64_MAX);
}

}  // namespace

void RunUntil(const std::shared_ptr<Stream>& stream, uint64_t target) {
  std::unique_lock lock(GlobalMutex());
  // What was queued when the call was made, and no more.
  if (target > stream->queued) target = stream->queued;
  while (stream->done < target) {
    if (stream->running) {
      StreamIdle().wait(lock);
      continue;
    }
    const std::function<void()> operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->running = true;
    lock.unlock();
    operation();
    lock.lock();
    stream->running = false;
    ++stream->done;
    StreamIdle().notify_all();
  }
}

void DrainAll() { Drain(/*blocking_only=*/false, 0); }

cudaError_t CheckNotCapturing() {
  return strict_captures > 0 ? Fail(cudaErrorStreamCaptureUnsupported)
                             : cudaSuccess;
}

cudaError_t Push(cudaStream_t handle, const void* what,
                 std::function<void()> operation) {
  std::shared_ptr<Stream> stream;
  uint64_t number = 0;
  const bool null_stream = IsNull(handle);
  {
    std::lock_guard lock(GlobalMutex());
    stream = StreamOf(handle);
    if (stream->capture != nullptr) {
      stream->capture->operations.push_back({what, std::move(operation)});
      return cudaSuccess;
    }
  }
  if (null_stream) {
    if (const cudaError_t e = CheckNotCapturing(); e != cudaSuccess) return e;
    Drain(/*blocking_only=*/true, stream->device);
  }
  {
    std::lock_guard lock(GlobalMutex());
    stream->queue.push_back([operation = std::move(operation)] {
      const DeviceSection section;
      operation();
    });
    number = ++stream->queued;
  }
  if (null_stream || emu::GetSettings().eager_streams) RunUntil(stream, number);
  return cudaSuccess;
}

}  // namespace promptcache::gpu::fake

namespace fake = promptcache::gpu::fake;
using fake::CheckDevice;
using fake::CheckNotCapturing;
using fake::CurrentDevice;
using fake::Fail;
using fake::GlobalMutex;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags,
                                         int) {
  if (const cudaError_t e = CheckDevice(CurrentDevice()); e != cudaSuccess) {
    return Fail(e);
  }
  auto stream = std::make_shared<fake::Stream>();
  stream->device = CurrentDevice();
  stream->blocking = (flags & cudaStreamNonBlocking) == 0;
  std::lock_guard lock(GlobalMutex());
  fake::AllStreams().insert(stream);
  *out = new CUstream_st{std::move(stream)};
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* out) {
  return cudaStreamCreateWithPriority(out, cudaStreamDefault, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  if (fake::IsNull(handle)) return Fail(cudaErrorInvalidResourceHandle);
  fake::RunUntil(handle->stream, UINT64_MAX);
  std::lock_guard lock(GlobalMutex());
  fake::AllStreams().erase(handle->stream);
  delete handle;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  std::shared_ptr<fake::Stream> stream;
  {
    std::lock_guard lock(GlobalMutex());
    stream = fake::StreamOf(handle);
    if (stream->capture != nullptr) {
      stream->capture->broken = true;
      return Fail(cudaErrorStreamCaptureUnsupported);
    }
  }
  if (fake::IsNull(handle)) fake::Drain(true, stream->device);
  fake::RunUntil(stream, UINT64_MAX);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  std::shared_ptr<fake::Stream> stream;
  uint64_t next;
  {
    std::lock_guard lock(GlobalMutex());
    stream = fake::StreamOf(handle);
    next = stream->done + 1;
  }
  fake::RunUntil(stream, next);  // each look finds one operation more done
  std::lock_guard lock(GlobalMutex());
  return stream->done == stream->queued ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  std::lock_guard lock(GlobalMutex());
  *device = fake::StreamOf(handle)->device;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t e = CheckDevice(CurrentDevice()); e != cudaSuccess) {
    return Fail(e);
  }
  if (const cudaError_t e = CheckNotCapturing(); e != cudaSuccess) return e;
  fake::DrainAll();
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function,
                               void* data) {
  return fake::Push(stream, reinterpret_cast<const void*>(function),
                    [=] { function(data); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  if ((flags & cudaEventInterprocess) != 0) return Fail(cudaErrorNotSupported);
  auto state = std::make_shared<fake::EventState>();
  state->timed = (flags & cudaEventDisableTiming) == 0;
  *out = new CUevent_st{std::move(state)};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) {
  return cudaEventCreateWithFlags(out, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  const auto state = event->state;
  std::shared_ptr<fake::Stream> stream;
  {
    std::lock_guard lock(GlobalMutex());
    stream = fake::StreamOf(handle);
    state->capture = stream->capture;
    if (state->capture != nullptr) return cudaSuccess;
  }
  const cudaError_t error = fake::Push(
      handle, nullptr, [state] { state->milliseconds = fake::Now(); });
  std::lock_guard lock(GlobalMutex());
  state->stream = stream;
  state->number = stream->queued;
  return error;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->state->capture != nullptr) {
    return Fail(cudaErrorStreamCaptureUnsupported);
  }
  if (event->state->stream == nullptr) return cudaSuccess;
  fake::RunUntil(event->state->stream, event->state->number);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto& state = *event->state;
  if (state.stream == nullptr) return cudaSuccess;
  uint64_t next;
  {
    std::lock_guard lock(GlobalMutex());
    if (state.stream->done >= state.number) return cudaSuccess;
    next = state.stream->done + 1;
  }
  fake::RunUntil(state.stream, next);
  return cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin,
                                 cudaEvent_t end) {
  std::lock_guard lock(GlobalMutex());
  for (const auto* event : {begin, end}) {
    const auto& state = *event->state;
    if (!state.timed || state.stream == nullptr) {
      return Fail(cudaErrorInvalidResourceHandle);
    }
    if (state.stream->done < state.number) return cudaErrorNotReady;
  }
  *milliseconds =
      static_cast<float>(end->state->milliseconds - begin->state->milliseconds);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event,
                                unsigned) {
  const auto& state = *event->state;
  {
    std::lock_guard lock(GlobalMutex());
    const auto stream = fake::StreamOf(handle);
    if (state.capture != nullptr) {
      // Joins the capture; its operations follow each other in one list.
      if (stream->capture == nullptr) stream->capture = state.capture;
      return stream->capture == state.capture
                 ? cudaSuccess
                 : Fail(cudaErrorStreamCaptureInvalidated);
    }
    if (stream->capture != nullptr && state.stream != nullptr) {
      return Fail(cudaErrorStreamCaptureUnsupported);  // not of this capture
    }
  }
  if (state.stream == nullptr) return cudaSuccess;
  return fake::Push(handle, nullptr,
                    [stream = state.stream, number = state.number] {
                      fake::RunUntil(stream, number);
                    });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle,
                                   cudaStreamCaptureMode mode) {
  if (fake::IsNull(handle)) return Fail(cudaErrorStreamCaptureUnsupported);
  std::lock_guard lock(GlobalMutex());
  if (handle->stream->capture != nullptr) return Fail(cudaErrorIllegalState);
  handle->stream->capture = std::make_shared<fake::Capture>();
  handle->stream->capture->relaxed = mode == cudaStreamCaptureModeRelaxed;
  if (mode != cudaStreamCaptureModeRelaxed) ++fake::strict_captures;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  std::lock_guard lock(GlobalMutex());
  *out = nullptr;
  if (fake::IsNull(handle) || handle->stream->capture == nullptr) {
    return Fail(cudaErrorIllegalState);
  }
  const auto capture = handle->stream->capture;
  for (const auto& stream : fake::AllStreams()) {
    if (stream->capture == capture) stream->capture = nullptr;
  }
  if (!capture->relaxed) --fake::strict_captures;
  if (capture->broken) return Fail(cudaErrorStreamCaptureInvalidated);
  *out = new CUgraph_st{std::move(capture->operations)};
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle,
                                  cudaStreamCaptureStatus* status) {
  std::lock_guard lock(GlobalMutex());
  *status = fake::StreamOf(handle)->capture == nullptr
                ? cudaStreamCaptureStatusNone
                : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph,
                                 unsigned long long) {
  *out = new CUgraphExec_st{
      std::make_shared<std::vector<fake::GraphOperation>>(graph->operations)};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out,
                                          cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(out, graph, flags);
}
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo* info) {
  const auto& before = *exec->operations;
  const auto& after = graph->operations;
  bool same = before.size() == after.size();
  for (size_t i = 0; same && i < after.size(); ++i) {
    same = before[i].what == after[i].what;
  }
  info->result = same ? cudaGraphExecUpdateSuccess
                      : cudaGraphExecUpdateErrorTopologyChanged;
  if (!same) return Fail(cudaErrorGraphExecUpdateFailure);
  exec->operations = std::make_shared<std::vector<fake::GraphOperation>>(after);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return fake::Push(stream, nullptr, [operations = exec->operations] {
    for (const auto& operation : *operations) operation.run();
  });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function,
                                 cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return cudaSuccess;
  }
  int limit = 0;
  if (const cudaError_t e = cudaDeviceGetAttribute(
          &limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, CurrentDevice());
      e != cudaSuccess) {
    return e;
  }
  if (value < 0 || value > limit) return Fail(cudaErrorInvalidValue);
  std::lock_guard lock(GlobalMutex());
  fake::SharedLimits()[function] = static_cast<size_t>(value);
  return cudaSuccess;
}

}  // extern "C"

namespace promptcache::gpu::emu {

void Enqueue(cudaStream_t stream, std::function<void()> operation) {
  fake::Push(stream, reinterpret_cast<const void*>(&Enqueue),
             std::move(operation));
}

void EnqueueLaunch(const void* kernel, dim3 grid, dim3 block,
                   size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> thread_body) {
  {
    std::lock_guard lock(GlobalMutex());
    const auto limit = fake::SharedLimits().find(kernel);
    if (shared_bytes > (size_t{48} << 10) &&
        (limit == fake::SharedLimits().end() || shared_bytes > limit->second)) {
      Fail(cudaErrorInvalidValue);  // as a GPU does
      return;
    }
    if (fake::StreamOf(stream)->device != CurrentDevice()) {
      Fail(cudaErrorInvalidResourceHandle);
      return;
    }
  }
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 ||
      grid.z == 0 || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) {
    Fail(cudaErrorInvalidConfiguration);
    return;
  }
  fake::Push(stream, kernel, [=, body = std::move(thread_body)] {
    RunGrid(grid, block, shared_bytes, body);
  });
}

}  // namespace promptcache::gpu::emu
