"""llama.cpp as a peer of tools/bench/peers: its programs, servers and files."""
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "promptcache"
MODEL = CACHE / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llama-cpp-python==0.3.36"
PROGRAMS = ("llama-bench", "llama-server", "llama-quantize")


def log(text):
    print(text, file=sys.stderr, flush=True)


# --- programs and files -------------------------------------------------------

def cpu_flags():
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return set(line.split(":")[1].split())
    return set()


def llama_cmake_options(kernels):
    """Its best build for this processor, or for AVX-512 without AMX, or AVX2."""
    flags = cpu_flags()
    # Its AMX kernels crash when built by GCC 12. (libomp-19-dev, where it is installed, is used.)
    clang = ["-DCMAKE_C_COMPILER=clang-19", "-DCMAKE_CXX_COMPILER=clang++-19"] if "amx_tile" in flags else []
    if kernels == "auto":
        return ["-DGGML_NATIVE=ON"] + clang
    names = {"avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2"}
    if kernels == "avx512":
        names |= {"avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI", "avx512_vbmi": "AVX512_VBMI",
                  "avx512_bf16": "AVX512_BF16"}
    return ["-DGGML_NATIVE=OFF"] + [f"-DGGML_{name}=ON" for flag, name in names.items() if flag in flags] + clang


def build_llama(kernels, needed=PROGRAMS):
    """Paths of PROGRAMS. Builds them all, unless those of `needed` exist."""
    folder = CACHE / "peers"
    build = folder / ("build" if kernels == "auto" else f"build-{kernels}")
    paths = [build / "bin" / name for name in PROGRAMS]
    if all((build / "bin" / name).exists() for name in needed):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    log(f"fetching {PACKAGE} and building llama.cpp in {build}")
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d",
                    folder, PACKAGE], check=True, stdout=sys.stderr)
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    subprocess.run(["tar", "xf", archive, "-C", folder], check=True)
    source = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    subprocess.run(["cmake", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF",
                    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
                    "-DLLAMA_BUILD_TESTS=OFF"] + llama_cmake_options(kernels), check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", build, "-j", str(os.cpu_count()), "--target", *PROGRAMS],
                   check=True, stdout=sys.stderr)
    return paths


class Programs:
    """Those that were named, as they are: then nothing is fetched or built, and
    what needs another one is left out. With none named, those of our build."""

    def __init__(self, args, needed):
        self.paths = {name: getattr(args, name.replace("-", "_")) for name in PROGRAMS}
        self.origin = ""
        self.left_out = []
        self.ran = {}  # name -> what it says of itself
        for name, path in self.paths.items():
            if path and not shutil.which(path):
                sys.exit(f"--{name} {path}: no such program")
        if not args.no_peer and not any(self.paths.values()):
            self.paths = dict(zip(PROGRAMS, build_llama(args.kernels, needed)))
            self.origin = f" of {PACKAGE}"

    def get(self, name):
        return self.paths[name]

    def lacks(self, name, what):
        """Whether it is not there, so that `what` is left out."""
        if self.paths[name]:
            return False
        self.leave_out(f"{what}: no --{name}")
        return True

    def leave_out(self, what):
        if what not in self.left_out:
            log(f"left out: {what}")
            self.left_out.append(what)

    def note(self, name, version):
        self.ran.setdefault(name, version)

    def note_version(self, name):
        if name in self.ran:
            return
        run = subprocess.run([self.paths[name], "--version"], check=False, capture_output=True, text=True, timeout=60)
        lines = [line for line in (run.stdout + run.stderr).splitlines() if line.startswith("version")]
        self.note(name, lines[0] if lines else "tells no version")

    def held_against(self):
        """What was really run."""
        if not self.ran:
            return "nothing: ours alone"
        return f"llama.cpp{self.origin}: " + ", ".join(f"{self.paths[name]} ({version})"
                                                       for name, version in self.ran.items())


def model_path(kind):
    return MODEL if kind == "Q4_1" else CACHE / "peers" / f"SmolLM2-135M-Instruct.{kind}.gguf"


def model_files(programs, types):
    """The package's file, and others made of it: those that exist or can be
    made. The others are told as left out."""
    files = {}
    for kind in types:
        path = model_path(kind)
        if not path.exists():
            if programs.lacks("llama-quantize", f"{kind} (there is no {path} yet)"):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".unfinished")
            subprocess.run([programs.get("llama-quantize"), "--allow-requantize", MODEL, unfinished, kind], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            unfinished.rename(path)
        files[kind] = path
    return files


# --- servers --------------------------------------------------------------------

def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass(frozen=True)
class LlamaSetting:
    flash: str
    slots: int = 1
    reuse: int = 0  # tokens of the shortest part to be moved to another place; 0: none is

    def exactness(self):
        return "approximate" if self.reuse else "exact"

    def options(self):
        reuse = ["--cache-reuse", str(self.reuse)] if self.reuse else []
        return ["-np", str(self.slots), "--flash-attn", self.flash] + reuse

    def __str__(self):
        reuse = f", --cache-reuse {self.reuse} (approximate)" if self.reuse else ""
        return f"{self.slots} slot{'s' if self.slots > 1 else ''}, flash attention {self.flash}{reuse}"


class LlamaServer:
    """Its own prompt cache on."""

    def __init__(self, args, path, folder, setting, context=8192, options=()):
        args.programs.note_version("llama-server")
        # A free one, so that a server that is there already is not taken for this one.
        self.port = free_port()
        self.log = open(folder / f"llama-server.{self.port}.log", "w", encoding="utf-8")
        self.options = ["-t", str(args.threads), "-c", str(context), *setting.options(), *options, *args.llama_options]
        self.process = subprocess.Popen(
            [args.programs.get("llama-server"), "-m", path, "--host", "127.0.0.1", "--port", str(self.port),
             *self.options], stdout=self.log, stderr=self.log)
        try:
            self.wait()
        except BaseException:
            self.close()
            raise

    def wait(self):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            answers = True
            try:
                self.post("/tokenize", {"content": "a"})  # answers once the model is loaded
            except OSError:
                answers = False
            # Looked at last: without our port a server ends, and another one answers.
            if self.process.poll() is not None:
                tail = pathlib.Path(self.log.name).read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RuntimeError(f"llama-server ended: {tail}")
            if answers:
                return
            time.sleep(0.1)
        raise RuntimeError("llama-server does not answer")

    def post(self, path, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)

    def prompt_ms(self, text):
        reply = self.post("/completion", {"prompt": text, "n_predict": 1, "temperature": 0, "cache_prompt": True,
                                          "id_slot": 0})
        return reply["timings"]["prompt_ms"]

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


class PeakMemory:
    """MiB that a process held at most, shared pages by its share (as
    promptcache-bench-serve tells of ours): the model's file and its buffers as
    long as it keeps them, nothing from before."""

    def __init__(self, pid):
        self.path = pathlib.Path(f"/proc/{pid}/smaps_rollup")
        self.peak, self.stopping = 0, threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()

    def sample(self):
        while True:
            for line in self.path.read_text(encoding="utf-8").splitlines():
                if line.startswith("Pss:"):
                    self.peak = max(self.peak, int(line.split()[1]) / 1024)
            if self.stopping.wait(0.1):
                return

    def stop(self):
        self.stopping.set()
        self.thread.join()
        return self.peak
