// The few calls of cuBLASLt that the engine makes, on the CPU in stream order:
// column-major, 16-bit or fp32 operands, fp32 accumulation. What is not
// implemented is refused, never ignored. An output's order of summation depends
// on the depth alone.
#include <cublasLt.h>

#include <new>
#include <vector>

#include "device_emulator.h"

struct cublasLtContext {};

namespace promptcache::gpu::fake {
namespace {

struct Layout {
  cudaDataType type;
  uint64_t rows, cols;
  int64_t leading;
  int32_t batch;
  int64_t batch_stride;
};
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));

struct Matmul {
  cublasComputeType_t compute;
  cudaDataType scale_type;
  cublasOperation_t trans_a, trans_b;
  cublasLtEpilogue_t epilogue;
  const void* bias;
  cudaDataType bias_type;
};
static_assert(sizeof(Matmul) <= sizeof(cublasLtMatmulDescOpaque_t));

const Layout& Of(cublasLtMatrixLayout_t layout) {
  return *reinterpret_cast<const Layout*>(layout);
}

bool IsKnown(cudaDataType type) {
  return type == CUDA_R_32F || type == CUDA_R_16BF || type == CUDA_R_16F;
}

float Load(const void* p, cudaDataType type, int64_t i) {
  if (type == CUDA_R_32F) return static_cast<const float*>(p)[i];
  if (type == CUDA_R_16BF) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  }
  return __half2float(static_cast<const __half*>(p)[i]);
}

void Store(void* p, cudaDataType type, int64_t i, float value) {
  if (type == CUDA_R_32F) {
    static_cast<float*>(p)[i] = value;
  } else if (type == CUDA_R_16BF) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(value);
  } else {
    static_cast<__half*>(p)[i] = __float2half(value);
  }
}

// [count][depth] of a column-major operand whose `count` side is its rows
// (`rows`) or its columns.
std::vector<float> Unpack(const void* p, const Layout& layout, int64_t base,
                          bool rows, size_t count, size_t depth) {
  std::vector<float> out(count * depth);
  for (size_t i = 0; i < count; ++i) {
    for (size_t l = 0; l < depth; ++l) {
      const auto row = static_cast<int64_t>(rows ? i : l);
      const auto col = static_cast<int64_t>(rows ? l : i);
      out[i * depth + l] =
          Load(p, layout.type, base + col * layout.leading + row);
    }
  }
  return out;
}

float Dot(const float* x, const float* y, size_t depth) {
  constexpr size_t kSums = 16;
  float sums[kSums] = {};
  size_t l = 0;
  for (; l + kSums <= depth; l += kSums) {
    for (size_t u = 0; u < kSums; ++u) sums[u] += x[l + u] * y[l + u];
  }
  float total = 0;
  for (float sum : sums) total += sum;
  for (; l < depth; ++l) total += x[l] * y[l];
  return total;
}

struct Call {
  Matmul matmul;
  float alpha, beta;
  const void *a, *b, *c;
  void* d;
  Layout la, lb, lc, ld;
  size_t depth;
};

void Run(const Call& call, int64_t batch) {
  const Layout& ld = call.ld;
  const bool a_rows = call.matmul.trans_a == CUBLAS_OP_N;
  const bool b_rows = call.matmul.trans_b != CUBLAS_OP_N;
  const auto a = Unpack(call.a, call.la, batch * call.la.batch_stride, a_rows,
                        ld.rows, call.depth);
  const auto b = Unpack(call.b, call.lb, batch * call.lb.batch_stride, b_rows,
                        ld.cols, call.depth);
  for (size_t j = 0; j < ld.cols; ++j) {
    for (size_t i = 0; i < ld.rows; ++i) {
      float value =
          call.alpha * Dot(&a[i * call.depth], &b[j * call.depth], call.depth);
      if (call.beta != 0) {
        value +=
            call.beta * Load(call.c, call.lc.type,
                             batch * call.lc.batch_stride +
                                 static_cast<int64_t>(j) * call.lc.leading +
                                 static_cast<int64_t>(i));
      }
      if (call.matmul.epilogue == CUBLASLT_EPILOGUE_BIAS) {
        value += Load(call.matmul.bias, call.matmul.bias_type,
                      static_cast<int64_t>(i));
      }
      Store(call.d, ld.type,
            batch * ld.batch_stride + static_cast<int64_t>(j) * ld.leading +
                static_cast<int64_t>(i),
            value);
    }
  }
}

bool SameShape(const Layout& x, uint64_t rows, uint64_t cols, int32_t batch) {
  return x.rows == rows && x.cols == cols && x.batch == batch &&
         x.leading >= static_cast<int64_t>(rows);
}

cublasStatus_t Check(const Call& call) {
  const Matmul& m = call.matmul;
  if (m.compute != CUBLAS_COMPUTE_32F || m.scale_type != CUDA_R_32F ||
      (m.epilogue != CUBLASLT_EPILOGUE_DEFAULT &&
       m.epilogue != CUBLASLT_EPILOGUE_BIAS)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  for (const Layout* layout : {&call.la, &call.lb, &call.lc, &call.ld}) {
    if (!IsKnown(layout->type)) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (call.la.type != call.lb.type) return CUBLAS_STATUS_NOT_SUPPORTED;
  const uint64_t rows = call.ld.rows;
  const uint64_t cols = call.ld.cols;
  const bool a_plain = m.trans_a == CUBLAS_OP_N;
  const bool b_plain = m.trans_b == CUBLAS_OP_N;
  const int32_t batch = call.ld.batch;
  const bool fits = SameShape(call.la, a_plain ? rows : call.depth,
                              a_plain ? call.depth : rows, batch) &&
                    SameShape(call.lb, b_plain ? call.depth : cols,
                              b_plain ? cols : call.depth, batch) &&
                    SameShape(call.lc, rows, cols, batch) &&
                    SameShape(call.ld, rows, cols, batch);
  return fits ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

template <class T>
cublasStatus_t Take(T* field, const void* value, size_t bytes) {
  if (bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(field, value, sizeof(T));
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace
}  // namespace promptcache::gpu::fake

namespace fake = promptcache::gpu::fake;

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion() { return 130000; }
const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "refused";
}
const char* cublasLtGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS"
         : status == CUBLAS_STATUS_NOT_SUPPORTED
             ? "CUBLAS_STATUS_NOT_SUPPORTED"
             : "CUBLAS_STATUS_INVALID_VALUE";
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc,
                                               size_t,
                                               cublasComputeType_t compute,
                                               cudaDataType_t scale_type) {
  new (desc) fake::Matmul{.compute = compute,
                          .scale_type = scale_type,
                          .trans_a = CUBLAS_OP_N,
                          .trans_b = CUBLAS_OP_N,
                          .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
                          .bias = nullptr,
                          .bias_type = CUDA_R_16BF};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc,
                                        cublasComputeType_t compute,
                                        cudaDataType_t scale_type) {
  *desc = new cublasLtMatmulDescOpaque_t;
  return cublasLtMatmulDescInit_internal(*desc, sizeof **desc, compute,
                                         scale_type);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete desc;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
    const void* value, size_t bytes) {
  auto* const m = reinterpret_cast<fake::Matmul*>(desc);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return fake::Take(&m->trans_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return fake::Take(&m->trans_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return fake::Take(&m->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return fake::Take(&m->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return fake::Take(&m->bias_type, value, bytes);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout,
                                                 size_t, cudaDataType type,
                                                 uint64_t rows, uint64_t cols,
                                                 int64_t leading) {
  new (layout) fake::Layout{type, rows, cols, leading, 1, 0};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout,
                                          cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t leading) {
  *layout = new cublasLtMatrixLayoutOpaque_t;
  return cublasLtMatrixLayoutInit_internal(*layout, sizeof **layout, type, rows,
                                           cols, leading);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(
    cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
    const void* value, size_t bytes) {
  auto* const l = reinterpret_cast<fake::Layout*>(layout);
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
      return fake::Take(&l->rows, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
      return fake::Take(&l->cols, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD:
      return fake::Take(&l->leading, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
      return fake::Take(&l->type, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return fake::Take(&l->batch, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return fake::Take(&l->batch_stride, value, bytes);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(
    cublasLtMatmulPreference_t preference, size_t) {
  *preference = {};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(
    cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t{};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(
    cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
    const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;  // there is one algorithm
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatmulPreference_t, int requested,
    cublasLtMatmulHeuristicResult_t results[], int* count) {
  *count = requested > 0 ? 1 : 0;
  if (*count == 1) results[0] = {};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                              const void* alpha, const void* a,
                              cublasLtMatrixLayout_t layout_a, const void* b,
                              cublasLtMatrixLayout_t layout_b, const void* beta,
                              const void* c, cublasLtMatrixLayout_t layout_c,
                              void* d, cublasLtMatrixLayout_t layout_d,
                              const cublasLtMatmulAlgo_t*, void*, size_t,
                              cudaStream_t stream) {
  fake::Call call = {.matmul = *reinterpret_cast<fake::Matmul*>(desc),
                     .alpha = *static_cast<const float*>(alpha),
                     .beta = *static_cast<const float*>(beta),
                     .a = a,
                     .b = b,
                     .c = c,
                     .d = d,
                     .la = fake::Of(layout_a),
                     .lb = fake::Of(layout_b),
                     .lc = fake::Of(layout_c),
                     .ld = fake::Of(layout_d),
                     .depth = 0};
  call.depth = call.matmul.trans_a == CUBLAS_OP_N ? call.la.cols : call.la.rows;
  if (const cublasStatus_t status = fake::Check(call);
      status != CUBLAS_STATUS_SUCCESS) {
    return status;
  }
  promptcache::gpu::emu::Enqueue(stream, [call] {
    for (int64_t i = 0; i < call.ld.batch; ++i) fake::Run(call, i);
  });
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
