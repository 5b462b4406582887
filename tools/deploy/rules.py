"""What must hold between images, manifests, flags and programs. A rule yields
one line for each fault."""

import os
import re

from facts import Pod, one, num_bytes, pods, seconds

SPARE_BYTES = 1 << 30    # a server's own needs beside tiers and tail
SPARE_SECONDS = 5        # from the end of a drain to the end of the process
GPU = "nvidia.com/gpu"


def flags_exist(facts):
    uses = []
    for pod in pods(facts):
        uses.append((pod.where, pod.program, pod.flag_lines))
    for stage in facts.containerfile.stages:
        for entry in facts.containerfile.instructions(stage, "ENTRYPOINT"):
            words = re.findall(r'"([^"]+)"', entry)
            uses.append((f"Containerfile: {stage}", words[0], words[1:]))
    for name, text in facts.units.items():
        start = re.search(r"(?m)^ExecStart=(.*)$", text)[1].split()
        uses.append((name, os.path.basename(start[0]), start[1:]))
    for where, program, lines in uses:
        names = []
        for line in lines:
            match = re.fullmatch(r"--(\w+)=.*", line)
            if not match:
                yield f"{where}: {line} is not --name=value"
                continue
            names.append(match[1])
            if match[1] not in {*facts.flags[program], "flagfile"}:
                yield f"{where}: {program} has no flag --{match[1]}"
        for name in {n for n in names if names.count(n) > 1}:
            yield f"{where}: --{name} twice"


def images_are_built(facts):
    for stage, image in facts.containerfile.images.items():
        if stage not in facts.containerfile.stages:
            yield f"Containerfile: no stage {stage}"
        if image.partition(":")[2] != facts.version:
            yield f"Containerfile: {image}, this is version {facts.version}"
    for pod in pods(facts):
        if pod.stage is None:
            yield f"{pod.where}: image {pod.container['image']} is not built"
        elif pod.program not in facts.containerfile.programs(pod.stage):
            yield f"{pod.where}: {pod.stage} has no {pod.program}"
        for init in pod.spec.get("initContainers", []):
            if init["image"] not in facts.containerfile.images.values():
                yield f"{pod.where}: image {init['image']} is not built"


def images_and_build_agree(facts):
    build = " ".join(facts.containerfile.instructions("build", "RUN"))
    made = set(re.findall(r"--target ((?:[a-z-]+ ?)+?) &&", build)[0].split())
    installed = set(re.findall(r"build/bin/(\S+)", build))
    copied = {p for stage in facts.containerfile.images
              for p in facts.containerfile.programs(stage)}
    if not made == installed == copied:
        yield (f"Containerfile: built {sorted(made)}, installed "
               f"{sorted(installed)}, copied {sorted(copied)}")


def the_gpu_image_is_whole(facts):
    build = " ".join(facts.containerfile.instructions("build", "RUN"))
    if f"/{facts.loaded} " not in build.replace(";", " "):
        yield f"Containerfile: {facts.loaded}, which the worker loads, is not there"
    copied = " ".join(facts.containerfile.instructions("worker-cuda", "COPY"))
    if "/out/cuda/" not in copied:
        yield "Containerfile: worker-cuda is without what the worker loads"


def ports_agree(facts):
    for pod in pods(facts):
        port = int(pod.flag("listen").rpartition(":")[2])
        if pod.flag("listen").startswith("127.") or \
                pod.flag("insecure_listen") != "true":
            yield f"{pod.where}: probes cannot reach {pod.flag('listen')}"
        exposed = facts.containerfile.instructions(pod.stage, "EXPOSE")
        if exposed != [str(port)]:
            yield f"{pod.where}: listens on {port}, image exposes {exposed}"
        ports = {p["name"]: p["containerPort"]
                 for p in pod.container["ports"]}
        if ports != {"grpc": port}:
            yield f"{pod.where}: listens on {port}, ports are {ports}"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = pod.container.get(kind, {}).get("grpc", {}).get("port")
            if probe != port:
                yield f"{pod.where}: listens on {port}, {kind} asks {probe}"
        policy = one(pod.documents, "NetworkPolicy", pod.program)
        for rule in policy["spec"].get("ingress", []):
            if [p["port"] for p in rule["ports"]] != [port]:
                yield f"{pod.where}: listens on {port}, not as its policy says"
    for variant, documents in facts.manifests.items():
        service = one(documents, "Service")
        worker = Pod(facts, variant, "promptcache-worker")
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in {p["name"] for p in
                                          worker.container["ports"]}:
                yield f"kubernetes/{variant}: the service's port is nobody's"


def selectors_match(facts):
    for pod in pods(facts):
        selected = [("itself", pod.document["spec"]["selector"])]
        for d in pod.documents:
            if d["kind"] in ("Service", "PodDisruptionBudget",
                             "NetworkPolicy") and \
                    d["metadata"]["name"] == pod.program:
                spec = d["spec"]
                selected.append((d["kind"], spec["podSelector"]
                                 if "podSelector" in spec
                                 else spec["selector"]))
        for what, selector in selected:
            labels = selector.get("matchLabels", selector)
            if not labels or not labels.items() <= pod.labels.items():
                yield f"{pod.where}: {what} selects {labels}"


def memory_suffices(facts):
    for pod in pods(facts):
        limit = num_bytes(pod.container["resources"]["limits"]["memory"])
        if pod.program == "promptcache-worker":
            need = num_bytes(pod.flag("tail_bytes"))
        else:
            need = num_bytes(pod.flag("host_bytes"))
            if not sees_gpus(pod):  # then the device tier is memory, too
                need += num_bytes(pod.flag("device_bytes"))
        if limit < need + SPARE_BYTES:
            yield (f"{pod.where}: limit of {limit} bytes, tiers or tail of "
                   f"{need} and {SPARE_BYTES} to spare")
        for init in pod.spec.get("initContainers", []):
            if "memory" not in init["resources"]["limits"]:
                yield f"{pod.where}: {init['name']} without a memory limit"


def draining_fits(facts):
    for pod in pods(facts):
        grace = pod.spec["terminationGracePeriodSeconds"]
        stop = pod.container.get("lifecycle", {}).get("preStop", {})
        need = stop.get("sleep", {}).get("seconds", 0) + SPARE_SECONDS
        if "drain_timeout" in pod.defaults:
            need += seconds(pod.flag("drain_timeout"))
        if grace < need:
            yield f"{pod.where}: {grace} s to end, {need} s are needed"
    for name, text in facts.units.items():
        drain = re.search(r"--drain_timeout=(\S+)", text)
        need = SPARE_SECONDS + (seconds(drain[1]) if drain else 0)
        if int(re.search(r"TimeoutStopSec=(\d+)", text)[1]) < need:
            yield f"{name}: {need} s are needed to end"


def folders_are_mounted(facts):
    for variant in facts.manifests:
        daemon = Pod(facts, variant, "promptcache-daemon")
        worker = Pod(facts, variant, "promptcache-worker")
        socket = daemon.flag("socket")
        if worker.flag("daemon_socket") != socket:
            yield f"kubernetes/{variant}: the servers name different sockets"
        mounted = [p.volume_at(p.flag(f)) for p, f in
                   ((daemon, "socket"), (worker, "daemon_socket"))]
        paths = {v["hostPath"]["path"] for _, v in mounted
                 if v and "hostPath" in v}
        if len(paths) != 1 or None in [m for m, _ in mounted]:
            yield f"kubernetes/{variant}: no folder of the node is shared"
        elif mounted[0][0].get("readOnly") or not mounted[1][0].get("readOnly"):
            yield (f"kubernetes/{variant}: the daemon writes to the socket's "
                   "folder, workers do not")
        for pod, path in ((daemon, daemon.flag("db")),
                          (worker, worker.flag("fingerprint_cache") + "/x"),
                          (worker, worker.flag("model"))):
            mount, _ = pod.volume_at(path)
            if mount is None:
                yield f"{pod.where}: nothing is mounted for {path}"
        for init in daemon.spec["initContainers"]:
            volumes = {m["mountPath"]: m["name"] for m in init["volumeMounts"]}
            for path in volumes:
                if path not in init["command"] or \
                        daemon.mounts[path]["name"] != volumes[path]:
                    yield f"{daemon.where}: {init['name']} misses {path}"


def users_agree(facts):
    for pod in pods(facts):
        context = pod.spec["securityContext"]
        user = f"{context['runAsUser']}:{context['runAsGroup']}"
        named = facts.containerfile.instructions(pod.stage, "USER")
        if not named or named[-1] != user:
            yield f"{pod.where}: runs as {user}, the image as {named[-1:]}"
        if context["runAsUser"] == 0 or not context["runAsNonRoot"]:
            yield f"{pod.where}: runs as root"
        own = pod.container["securityContext"]
        if own["allowPrivilegeEscalation"] or \
                not own["readOnlyRootFilesystem"] or \
                own["capabilities"] != {"drop": ["ALL"]} or \
                not set(own) <= {"allowPrivilegeEscalation", "capabilities",
                                 "readOnlyRootFilesystem"}:
            yield f"{pod.where}: more rights than it needs: {own}"
    for variant in facts.manifests:
        groups = {Pod(facts, variant, p).spec["securityContext"]["runAsGroup"]
                  for p in facts.flags}
        if len(groups) != 1:
            yield f"kubernetes/{variant}: the servers have groups {groups}"
    for pod in pods(facts):
        for name in ("hostPID", "hostIPC", "hostNetwork"):
            if pod.spec.get(name):
                yield f"{pod.where}: {name} is not needed"


def sees_gpus(pod):
    env = {e["name"]: e.get("value") for e in pod.container.get("env", [])}
    return env.get("NVIDIA_VISIBLE_DEVICES") == "all" and \
        pod.spec.get("runtimeClassName") == "nvidia"


def gpus_are_for_workers(facts):
    for pod in pods(facts):
        limit = pod.container["resources"]["limits"].get(GPU)
        request = pod.container["resources"]["requests"].get(GPU)
        gpu_variant = pod.where.startswith("kubernetes/base")
        wants = "1" if gpu_variant and pod.program.endswith("worker") else None
        if (limit, request) != (wants, wants):
            yield f"{pod.where}: {limit} GPUs, {wants} expected"
        if pod.program.endswith("daemon") and sees_gpus(pod) != gpu_variant:
            yield f"{pod.where}: sees GPUs: {sees_gpus(pod)}"
        if not gpu_variant and "nvidia" in str(pod.document):
            yield f"{pod.where}: needs NVIDIA's software"


def threads_are_limited(facts):
    for pod in pods(facts):
        limit = pod.container["resources"]["limits"].get("cpu")
        if limit and "threads" in pod.defaults and \
                pod.flag("threads") != str(limit):
            yield (f"{pod.where}: {pod.flag('threads')} threads on "
                   f"{limit} cores")


def packages_are_those_linked(facts):
    """Both ways: a missing one breaks the image, another one bloats it."""
    needed = set()
    for stage in facts.containerfile.images:
        packages = set(facts.containerfile.packages(stage))
        for program in facts.containerfile.programs(stage):
            needed |= facts.linked[program]
            missing = facts.linked[program] - packages
            if missing:
                yield (f"Containerfile: {stage}: {program} needs "
                       f"{', '.join(sorted(missing))}")
    spare = set(facts.containerfile.packages("runtime")) - needed
    if spare:
        yield f"Containerfile: nobody links {', '.join(sorted(spare))}"


RULES = [flags_exist, images_are_built, images_and_build_agree,
         the_gpu_image_is_whole, ports_agree, selectors_match,
         memory_suffices, draining_fits, folders_are_mounted, users_agree,
         gpus_are_for_workers, threads_are_limited,
         packages_are_those_linked]


def faults(facts):
    for rule in RULES:
        for line in rule(facts):
            yield rule.__name__, line
