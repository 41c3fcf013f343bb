"""`bayflower deploy init --regions`: a folder for each part, and what each of its containers may
see.
"""

from __future__ import annotations

import stat
import time

import pytest
import yaml

from bayflower.deploy import branches, keeper, layout
from bayflower.deploy.local import Local
from bayflower.errors import ConfigError


def test_every_part_is_a_deployment_of_its_own(tmp_path):
    made = branches.init(tmp_path / "fed", clients=5, regions=2)
    assert [one.folder.name for one in made] == ["upper", "region-0", "region-1"]
    assert layout.parts(tmp_path / "fed") == [one.folder for one in made]
    upper, first, second = (layout.read(one.folder) for one in made)
    assert layout.read(tmp_path / "fed") == upper  # commands about runs go there
    assert (list(first.numbers()), list(second.numbers())) == ([0, 1, 2], [3, 4])
    assert {one.everyone() for one in made} == {5}
    assert upper.client_folders() == {}
    assert list(second.client_folders()) == [3, 4]
    assert sorted(key.name for key in (upper.server / "nodes").iterdir()) == [
        "client-0.pub",
        "client-1.pub",
    ]
    authorities = {(one.folder / "ca" / "ca.crt").read_bytes() for one in made}
    assert len(authorities) == 3
    above = second.server / "above"
    assert (above / "ca.crt").read_bytes() == (upper.folder / "ca" / "ca.crt").read_bytes()
    assert stat.S_IMODE((above / "node.key").stat().st_mode) == 0o600
    assert upper.called("client-1") == "region-1"
    assert second.called("client-3") == "client-3"


def test_containers_of_a_region_see_what_they_need(tmp_path):
    branches.init(tmp_path / "fed", clients=4, regions=2)
    upper = yaml.safe_load((tmp_path / "fed" / "upper" / "compose.yaml").read_text())
    assert sorted(upper["services"]) == ["gate", "register", "serverapp", "superlink"]
    region = yaml.safe_load((tmp_path / "fed" / "region-1" / "compose.yaml").read_text())
    services = region["services"]
    more = {"above", "aboveapp", "keeper"}
    more |= {f"{kind}-{k}" for kind in ("supernode", "clientapp") for k in (2, 3)}
    assert set(services) == {*upper["services"], *more}
    name = upper["name"] + "_federation"
    assert region["networks"]["upstream"] == {"external": True, "name": name}
    users = {name for name, one in services.items() if "spool:/spool" in one["volumes"]}
    assert users == {"aboveapp", "keeper", "serverapp"}
    assert {name for name, one in services.items() if "upstream" in one["networks"]} == {"above"}
    assert not any("node.key" in one for one in services["aboveapp"]["volumes"])
    for one in services.values():
        assert one["read_only"] is True
        assert one["cap_drop"] == ["ALL"]
    node = services["above"]["command"]
    assert node[node.index("--superlink") + 1] == "gate:9092"
    config = node[node.index("--node-config") + 1]
    assert config == 'partition-id=1 num-partitions=2 spool="/spool" audit-dir="/audit"'
    config = services["supernode-3"]["command"]
    assert any(word.startswith("partition-id=3 num-partitions=4 ") for word in config)


def test_on_several_machines_each_region_has_its_host(tmp_path):
    hosts = {"hosts": ["fl.example.org"], "region_hosts": ["a.example.org", "b.example.org"]}
    made = branches.init(tmp_path / "fed", clients=4, regions=2, **hosts)
    assert [one.hosts[0] for one in made] == ["fl.example.org", "a.example.org", "b.example.org"]
    region = yaml.safe_load((made[2].folder / "server" / "compose.yaml").read_text())
    node = region["services"]["above"]["command"]
    assert node[node.index("--superlink") + 1] == "fl.example.org:9092"
    assert region["networks"]["upstream"] == {}
    assert "./above/node.key:/client/node.key:ro" in region["services"]["above"]["volumes"]
    client = yaml.safe_load((made[2].folder / "client-3" / "compose.yaml").read_text())
    words = client["services"]["supernode-3"]["command"]
    assert words[words.index("--superlink") + 1] == "b.example.org:9092"


WRONG = [
    ({"regions": 7}, "regions must be in"),
    ({"regions": 2, "hosts": ["a"]}, "one for each region, or neither"),
    ({"regions": 2, "hosts": ["a"], "region_hosts": ["b"]}, "one for each region, or neither"),
]


@pytest.mark.parametrize(("given", "why"), WRONG)
def test_wrong_arguments_are_refused_and_leave_nothing(tmp_path, given, why):
    with pytest.raises(ConfigError, match=why):
        branches.init(tmp_path / "fed", clients=6, **given)
    assert not (tmp_path / "fed").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(ConfigError, match="is not overwritten"):
        branches.init(tmp_path / "full", clients=2, regions=1)
    assert (tmp_path / "full" / "x").read_text() == "mine"


def test_processes_of_a_region_dial_the_server_beside_them(tmp_path):
    made = branches.init(tmp_path / "fed", clients=2, regions=1)
    upper, region = Local(made[0]), Local(layout.read(made[1].folder))
    assert upper.names() == ["superlink", "gate"]
    assert region.names() == ["superlink", "gate", "above", "keeper", "supernode-0", "supernode-1"]
    upper.folder.mkdir()
    upper.facts["gate"] = 1234
    upper.save()
    words = region.words("above")
    assert words[words.index("--superlink") + 1] == "127.0.0.1:1234"
    assert f'spool="{region.spool}"' in words[words.index("--node-config") + 1]


def test_the_keeper_removes_old_folders_but_none_in_which_a_request_waits(tmp_path):
    """No SuperLink is asked: the run of the one that waits has just been started."""
    for number in range(keeper.KEPT + 3):
        folder = tmp_path / str(number)
        (folder / "requests").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (tmp_path / "0" / "requests" / f"{'0' * 64}.safetensors").write_text("")
    (tmp_path / "0" / "run.json").write_text(f'{{"run": "7", "at": {time.time()}}}')
    for number in range(keeper.KEPT + 3):  # in this order
        (tmp_path / str(number) / "config.json").touch()
        time.sleep(0.01)
    keeper.look(None, tmp_path, print)  # type: ignore[arg-type]
    there = {int(path.name) for path in tmp_path.iterdir()}
    assert there == {0, *range(3, keeper.KEPT + 3)}
