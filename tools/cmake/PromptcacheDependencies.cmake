# Everything comes from the distribution's packages (tools/install_deps).
find_package(Threads REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(glog CONFIG REQUIRED)
find_package(EXPAT REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(SQLite3 REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(GTest CONFIG REQUIRED)
find_package(benchmark CONFIG REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)

if(PROMPTCACHE_RPC)
  find_package(Protobuf REQUIRED)  # the module, not CONFIG: Debian has no other
  find_package(gRPC CONFIG REQUIRED)
  find_package(CLI11 CONFIG REQUIRED)
endif()

# The CUDA toolkit is optional: without it there is no CUDA device in what is
# built. ON insists on it. Kernels are compiled where nvcc's host compiler is
# the project's (g++); their emulation on the CPU needs the headers alone.
set(PROMPTCACHE_CUDA_ARCHITECTURES 90-real CACHE STRING
    "GPUs that kernels are compiled for; tools/check_nvcc has the full list")
set(PROMPTCACHE_NVCC OFF)
if(NOT PROMPTCACHE_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND AND PROMPTCACHE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PROMPTCACHE_CUDA=ON, but no CUDA toolkit was found")
  endif()
endif()
if(CUDAToolkit_FOUND)
  # The runtime, for programs; promptcache::fake_cudart in its place in tests.
  add_library(promptcache_cudart INTERFACE)
  add_library(promptcache::cudart ALIAS promptcache_cudart)
  target_link_libraries(promptcache_cudart INTERFACE CUDA::cudart_static)
endif()
if(CUDAToolkit_NVCC_EXECUTABLE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(PROMPTCACHE_NVCC ON)
  set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}")
  set(CMAKE_CUDA_ARCHITECTURES "${PROMPTCACHE_CUDA_ARCHITECTURES}")
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # promptcache::cudart says which
  enable_language(CUDA)
  # CMake 3.25 does not know this one.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3")
  if(PROMPTCACHE_CCACHE)
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${PROMPTCACHE_CCACHE}")
  endif()
endif()
