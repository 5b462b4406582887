#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "cuda/kernels/cublas_lt.h"

namespace promptcache::gpu {
namespace {

// The toolkit's major version names the library's.
constexpr char kLibrary[] = "libcublasLt.so.13";
constexpr char kInstalledLibrary[] = "/usr/local/cuda/lib64/libcublasLt.so.13";

template <typename Function>
bool Look(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// The name that is missing; null when none is.
const char* LookAll(void* library, CublasLt* lt) {
#define PC_LOOK(member, name) \
  if (!Look(library, name, &lt->member)) return name
  PC_LOOK(create, "cublasLtCreate");
  PC_LOOK(destroy, "cublasLtDestroy");
  PC_LOOK(get_version, "cublasLtGetVersion");
  PC_LOOK(get_status_string, "cublasLtGetStatusString");
  PC_LOOK(matmul, "cublasLtMatmul");
  PC_LOOK(get_heuristic, "cublasLtMatmulAlgoGetHeuristic");
  PC_LOOK(desc_create, "cublasLtMatmulDescCreate");
  PC_LOOK(desc_destroy, "cublasLtMatmulDescDestroy");
  PC_LOOK(desc_set, "cublasLtMatmulDescSetAttribute");
  PC_LOOK(layout_create, "cublasLtMatrixLayoutCreate");
  PC_LOOK(layout_destroy, "cublasLtMatrixLayoutDestroy");
  PC_LOOK(preference_create, "cublasLtMatmulPreferenceCreate");
  PC_LOOK(preference_destroy, "cublasLtMatmulPreferenceDestroy");
  PC_LOOK(preference_set, "cublasLtMatmulPreferenceSetAttribute");
#undef PC_LOOK
  return nullptr;
}

absl::StatusOr<const CublasLt*> Open() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  std::string why;
  if (library == nullptr) {
    why = dlerror();
    library = dlopen(kInstalledLibrary, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("cuBLASLt: ", why,
                     "; install CUDA 13's cublas or put its folder into "
                     "LD_LIBRARY_PATH"));
  }
  // Both live as long as the process.
  auto* lt = new CublasLt;
  if (const char* missing = LookAll(library, lt); missing != nullptr) {
    delete lt;
    return absl::NotFoundError(
        absl::StrCat("cuBLASLt: ", kLibrary, " has no ", missing));
  }
  return lt;
}

}  // namespace

absl::StatusOr<const CublasLt*> FindCublasLt() {
  static const auto* const found = new absl::StatusOr<const CublasLt*>(Open());
  return *found;
}

}  // namespace promptcache::gpu
