"""What a secure sum costs: bytes and CPU seconds of a client and of the server.

python benchmarks/secure_sums.py [--clients 10,50] [--params 600000,11000000] [--limbs 1,2]

One client masks its vector for real, with masks shared with all others. The server unmasks for
real, once with everybody in the sum and once with a drop-out. Only the other clients' vectors are
left out: they would cost the same as the first one's. Times are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from bayflower.maths.exact import Scaled, Total
from bayflower.maths.window import agree, decode, encode
from bayflower.privacy.party import Party
from bayflower.privacy.session import canonical, more_than, read_session
from bayflower.privacy.sums import Gathering, make_session, read_offer


def measure(clients: int, params: int, limbs: int) -> dict[str, float]:
    """Return bytes and seconds of one round."""
    parties = {client: Party("bench", client, {}, {}) for client in range(clients)}
    cards = tuple(party.card for party in parties.values())
    threshold = more_than(2 / 3, clients)
    offers, enrol = {}, 0.0
    for client, party in parties.items():
        begin = time.process_time()
        said = party.enrol(cards, threshold)
        enrol = time.process_time() - begin
        offers[client] = read_offer(
            json.loads(canonical(said)), cards[client], cards, "bench", threshold
        )
    statistic = {"w": Scaled(torch.randn(params), 100.0), "n": torch.tensor(100)}
    window = agree(statistic, clients, 2.0**20 * 100, limbs)
    session = make_session("bench", 1, window.digest(), cards, offers, 2 / 3)
    text = session.to_text()

    begin = time.process_time()
    vector = encode(statistic, window)
    encoded = time.process_time()
    session = read_session(text)
    parties[0].ready(session, window.digest())
    parties[0].mask(session, vector.numpy().view(np.uint64))
    masked = time.process_time()

    gathering = Gathering(session, offers, window.size)
    added = time.process_time()
    gathering.take(0, vector.numpy().view(np.uint64))
    added = time.process_time() - added
    ends, helps, shares = [], 0.0, 0
    for gone in (0, 1):
        gathering.there = list(range(clients - gone))
        for kind in ("seed", "key")[: gone + 1]:
            owners = gathering.there if kind == "seed" else gathering.gone
            for holder, party in parties.items():
                party.notes["signed"] = {} if kind == "seed" else party.notes["signed"]
                party.notes["given"], party.notes["summed"] = {}, 0
                sealed = json.loads(gathering.sealed_for(holder, owners))
                sealed = {int(key): value for key, value in sealed.items()}
                start = time.process_time()
                if kind == "seed":
                    said = party.unmask(session, gathering.there, sealed)
                else:
                    said = party.recover(session, gathering.there, gathering.signatures, sealed)
                helps = max(helps, time.process_time() - start)
                shares = max(shares, len(canonical(said)))
                gathering.hear(holder, kind, said)
        start = time.process_time()
        gathering.result()
        ends.append(time.process_time() - start)
    start = time.process_time()
    decode(vector, window, Total())
    decoded = time.process_time() - start
    offer = len(canonical({"ticket": offers[0].ticket, "sealed": offers[0].sealed}))
    plain = 4 * params
    up = 8 * window.size + offer + shares
    return {
        "clients": clients,
        "params": params,
        "limbs": limbs,
        "bytes_up": up,
        "up_over_plain": up / plain,
        "bytes_down_more": 2 * len(text) + len(gathering.sealed_for(0, range(clients))),
        "client_encode_s": encoded - begin,
        "client_mask_s": masked - encoded,
        "client_enrol_s": enrol,
        "client_unmask_s": helps,
        "server_add_s": added,
        "server_unmask_s": ends[0],
        "server_drop_out_s": ends[1] - ends[0],
        "server_decode_s": decoded,
    }


def main() -> None:
    """Print one JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="10,50")
    parser.add_argument("--params", default="600000,11000000")
    parser.add_argument("--limbs", default="1,2")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for params in given.params.split(","):
        for clients in given.clients.split(","):
            for limbs in given.limbs.split(","):
                print(json.dumps(measure(int(clients), int(params), int(limbs))), flush=True)


if __name__ == "__main__":
    main()
