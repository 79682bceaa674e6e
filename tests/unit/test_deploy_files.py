"""What deploy/ has fits the schemas that it is for, and what raypp does. Nothing is started."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from ray.serve.schema import ServeDeploySchema
from referencing import Registry
from referencing.jsonschema import DRAFT7

from raypp.actors import cluster
from raypp.cli.main import EntryPoints, main
from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpAddress, HttpSettings
from serve_app import app, run, running_serve
from serve_app.app import split_arguments
from serve_app.http_app import OPEN_PATHS
from serve_app.proxy_answers import ENVIRONMENT, HEALTH_TIMEOUT_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
INSTALL = DEPLOY / "install.sh"
DATA = ROOT / "tests/data"

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
CLAIM, RAY_SERVICE = yaml.safe_load_all((DEPLOY / "kuberay/rayservice.yaml").read_text())
CLUSTER = RAY_SERVICE["spec"]["rayClusterConfig"]
HEAD = CLUSTER["headGroupSpec"]["template"]["spec"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
WORKER = WORKERS["template"]["spec"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def errors_of(document: Any, schema_file: str, definition: str | None = None) -> list[str]:
    """Return what a schema of tests/data finds wrong with a document."""
    files = ("compose_spec.json", "kubernetes_objects.json", "kuberay_rayservice.json")
    read = {name: DRAFT7.create_resource(json.loads((DATA / name).read_text())) for name in files}
    registry: Registry[Any] = Registry().with_resources(read.items())
    schema = {"$ref": schema_file + (f"#/definitions/{definition}" if definition else "")}
    found = Draft7Validator(schema, registry=registry).iter_errors(document)
    return [f"{error.json_path}: {error.message[:300]}" for error in found]


def served(*arguments: str) -> tuple[EngineConfig, HttpSettings, HttpAddress]:
    """Return what the command line makes of its arguments."""
    calls = []

    def serve(
        config: EngineConfig, settings: HttpSettings, *, address: HttpAddress, on_ready: Any, **_: object
    ) -> None:
        calls.append((config, settings, address))

    assert main(arguments, entry_points=EntryPoints(serve=serve)) == 0
    return calls[0]


def substituted(value: str, **given: str) -> str:
    """Return a value of a compose file with its variables replaced."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: given.get(found[1], found[2]), value)


def seconds(duration: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(s|m)", duration).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]


def seconds_to_stop() -> float:
    """Return how long the end of a server may take: of its replica, and then of Ray Serve and of Ray."""
    replica_s = app.end_timeout_s(*split_arguments({"model": "tiny"}))
    return replica_s + run._DELETE_S + running_serve._END_S + cluster._STOP_S


# deploy/install.sh


def install(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(INSTALL), *options], capture_output=True, text=True, timeout=30)


def planned(*options: str) -> list[list[str]]:
    """Return the commands that the script would run."""
    done = install("--dry-run", *options)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_the_script_has_no_mistake_in_its_syntax_and_says_its_options() -> None:
    subprocess.run(["bash", "-n", str(INSTALL)], check=True, timeout=30)
    assert "--device" in install("--help").stdout
    assert set(re.findall(r"--[a-z-]+", install("--help").stdout)) >= {"--into", "--from", "--system", "--dry-run"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devise", "cpu"), "unknown option --devise"),
        (("--device", "tpu"), "--device is tpu; expected: cpu or cuda"),
        (("--into",), "--into needs a value"),
    ],
)
def test_mistakes_in_options_are_named(options: tuple[str, ...], said: str) -> None:
    done = install(*options)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_server_without_root_gets_an_environment_and_nothing_else() -> None:
    commands = planned("--into", "/srv/raypp", "--from", "dist/raypp-1.whl")
    assert commands[0][1:] == ["-m", "venv", "/srv/raypp"]
    assert commands[1][0] == "/srv/raypp/bin/python"
    assert commands[1][-3:-1] == ["--constraint", str(ROOT / "constraints.txt")]
    assert commands[1][-1].startswith("raypp[serve] @ file:///")
    assert {command[0] for command in commands[1:]} == {"/srv/raypp/bin/python", "/srv/raypp/bin/raypp"}


def test_an_image_gets_packages_a_user_and_commands_on_the_path() -> None:
    commands = planned("--system", "--device", "cuda")
    text = "\n".join(map(shlex.join, commands))
    assert "raypp[serve,gpu] @ " in text
    assert "gcc" in text, "Triton compiles with it"
    assert "useradd --uid 10001" in text
    linked = [command[-1] for command in commands[-3:]]
    assert linked == ["/usr/local/bin/raypp", "/usr/local/bin/ray", "/usr/local/bin/serve"]
    assert "gcc" not in "\n".join(map(shlex.join, planned("--system", "--device", "cpu")))


# deploy/Dockerfile


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_is_made_by_the_script(target: str) -> None:
    (stage,) = re.findall(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    (options,) = re.findall(r"deploy/install\.sh (.*)", stage)
    assert planned(*shlex.split(options)) == planned("--system", "--device", target)
    assert "USER raypp" in stage
    for name, value in ENVIRONMENT.items():
        assert f"{name}={value}" in stage
    (command,) = re.findall(r"^CMD (.*)$", stage, re.MULTILINE)
    config, _, address = served(*json.loads(command))
    assert (config.model.model, address.host) == ("tiny", "0.0.0.0")


# deploy/compose.yaml


def test_the_compose_file_fits_its_schema() -> None:
    plain = {name: value for name, value in COMPOSE.items() if name != "name"}  # which came after this schema
    assert not errors_of(plain, "compose_spec.json")
    wrong = json.loads(json.dumps(plain))
    wrong["services"]["raypp"]["stop_grace_periods"] = "90s"
    assert errors_of(wrong, "compose_spec.json"), "the schema finds something"


@pytest.mark.parametrize("service", ["raypp", "raypp-cpu"])
def test_a_service_serves_as_its_health_and_its_secrets_say(service: str) -> None:
    described = COMPOSE["services"][service]
    (secret,) = described["secrets"]
    assert secret in COMPOSE["secrets"]
    command = [substituted(word, MODEL="Qwen/Qwen3-8B", NUM_STAGES="2") for word in described["command"]]
    config, settings, address = served(*command)
    assert (config.model.model, config.parallel.num_stages) == ("Qwen/Qwen3-8B", 2)
    assert settings.api_key_file == f"/run/secrets/{secret}"
    assert f"localhost:{address.port}/health" in described["healthcheck"]["test"][-1]
    assert described["ports"][0].endswith(f":{address.port}:{address.port}")
    assert "/health" in OPEN_PATHS, "it is asked without a key"
    assert seconds(described["healthcheck"]["timeout"]) > HEALTH_TIMEOUT_S + 1
    assert seconds(described["stop_grace_period"]) > seconds_to_stop()
    volume, _, folder = described["volumes"][0].partition(":")
    assert volume in COMPOSE["volumes"]
    assert f"HF_HOME={folder}" in DOCKERFILE
    target = described["build"]["target"]
    assert described["profiles"] == [target]
    assert f" AS {target}\n" in DOCKERFILE
    assert (DEPLOY / described["build"]["context"] / described["build"]["dockerfile"]).is_file()


def test_every_variable_of_the_compose_file_has_its_line_in_the_example() -> None:
    named = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text())) - {"VERSION"}
    lines = (DEPLOY / "compose.env.example").read_text().splitlines()
    assert {line.partition("=")[0] for line in lines if not line.startswith("#")} == named


# deploy/raypp.service


def unit() -> dict[str, list[str]]:
    """Return the settings of the unit's service."""
    text = (DEPLOY / "raypp.service").read_text().split("[Service]")[1].split("[Install]")[0]
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_starts_a_server_with_keys() -> None:
    settings_of_unit = unit()
    lines = (DEPLOY / "raypp.env").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    (start,) = settings_of_unit["ExecStart"]
    command = start.replace("$MODEL", given["MODEL"]).replace("$OPTIONS", given["OPTIONS"]).replace("%d", "/keys")
    config, settings, _ = served(*command.split()[1:])
    assert (config.model.model, config.parallel.num_stages) == ("tiny", 2)
    assert settings.api_key_file == "/keys/" + settings_of_unit["LoadCredential"][0].partition(":")[0]
    assert settings_of_unit["EnvironmentFile"] == ["/etc/raypp/raypp.env"]


def test_the_unit_gives_the_server_time_to_end_its_processes_itself() -> None:
    settings_of_unit = unit()
    assert settings_of_unit["KillMode"] == ["mixed"]
    assert float(settings_of_unit["TimeoutStopSec"][0]) > seconds_to_stop()
    assert settings_of_unit["OOMPolicy"] == ["continue"]


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("needs systemd-analyze")
    here = tmp_path / "raypp.service"
    text = (DEPLOY / "raypp.service").read_text()
    text = text.replace("/opt/raypp/bin/raypp", "/bin/true").replace("/usr/bin/nvidia-modprobe", "/bin/true")

    def complaints() -> str:
        done = subprocess.run([systemd, "verify", str(here)], capture_output=True, text=True, timeout=60)
        return "\n".join(line for line in done.stderr.splitlines() if here.name in line)

    here.write_text(text)
    assert not complaints()
    here.write_text(text.replace("KillMode=", "KilMode="))
    assert "KilMode" in complaints()


# deploy/kuberay/rayservice.yaml


def test_the_manifest_fits_the_schemas_of_kubernetes_and_kuberay() -> None:
    assert not errors_of(CLAIM, "kubernetes_objects.json", "io.k8s.api.core.v1.PersistentVolumeClaim")
    assert not errors_of(RAY_SERVICE, "kuberay_rayservice.json")


@pytest.mark.parametrize("place", ["spec.upgradeStrategies", "pod.volume", "container.readyProbe", "probe.periods"])
def test_the_schemas_find_what_is_misspelt(place: str) -> None:
    wrong = json.loads(json.dumps(RAY_SERVICE))
    pod = wrong["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    container = pod["containers"][0]
    where, name = place.split(".")
    {"spec": wrong["spec"], "pod": pod, "container": container, "probe": container["readinessProbe"]}[where][name] = 1
    assert errors_of(wrong, "kuberay_rayservice.json")


def serve_config() -> ServeDeploySchema:
    return ServeDeploySchema.model_validate(yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"]))


def test_its_application_is_one_that_raypp_can_build() -> None:
    (application,) = serve_config().applications
    module, _, name = application.import_path.partition(":")
    assert (module, name) == (app.__name__, app.build.__name__)
    config, settings = split_arguments(application.args)
    gpus = WORKER["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus * WORKERS["replicas"] == config.parallel.num_stages == 2
    assert WORKERS["replicas"] == WORKERS["minReplicas"] == WORKERS["maxReplicas"]
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "the replica is not for the head"
    assert settings.replica_num_cpus > 0
    (pinned,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert CLUSTER["rayVersion"] == pinned


@pytest.mark.parametrize("pod", [HEAD, WORKER], ids=["head", "worker"])
def test_what_a_pod_mounts_is_there(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts[environment["HF_HOME"]]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    _, settings = split_arguments(serve_config().applications[0].args)
    assert settings.api_key_file is not None
    secret = mounts[str(Path(settings.api_key_file).parent)]["secret"]["secretName"]
    assert f"kubectl create secret generic {secret} " in (DEPLOY / "kuberay/rayservice.yaml").read_text()
    assert ENVIRONMENT.items() <= environment.items()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["serve"] == serve_config().http_options.port
    assert pod["enableServiceLinks"] is False
    (number,) = re.findall(r"useradd --uid (\d+)", INSTALL.read_text())
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(number)


def test_no_probe_ends_a_pod_for_an_engine_that_raypp_replaces() -> None:
    ray_health = ("/api/healthz", 52365)
    asked = {
        (name, kind): (probe["httpGet"]["path"], probe["httpGet"]["port"])
        for name, pod in (("head", HEAD), ("worker", WORKER))
        for kind, probe in pod["containers"][0].items()
        if kind.endswith("Probe")
    }
    assert asked.pop(("worker", "readinessProbe")) == ("/-/healthz", serve_config().http_options.port)
    assert set(asked.values()) == {ray_health}
    assert {kind for _, kind in asked} == {"startupProbe", "livenessProbe", "readinessProbe"}


def test_a_pod_has_time_to_leave_its_service_and_to_end() -> None:
    (_, waits) = WORKER["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    probe = WORKER["containers"][0]["readinessProbe"]
    assert int(waits) < WORKER["terminationGracePeriodSeconds"]
    assert probe["periodSeconds"] * probe["failureThreshold"] <= int(waits)


# docs/deploy.md


def test_files_and_options_that_the_page_names_exist() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE | re.DOTALL)
    code = "\n".join(blocks)
    named = set(re.findall(r"\bdeploy/[\w./-]+", code)) - {"deploy/api-keys", "deploy/compose.env"}
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).is_file()]
    for options in re.findall(r"deploy/install\.sh (.*)$", code, re.MULTILINE):
        planned(*shlex.split(options))
