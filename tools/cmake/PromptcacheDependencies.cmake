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

# The CUDA toolkit is optional: it is looked for, and nothing is built with it
# yet. ON insists on it.
if(NOT PROMPTCACHE_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND AND PROMPTCACHE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PROMPTCACHE_CUDA=ON, but no CUDA toolkit was found")
  endif()
endif()
