"""init_method="tcp://host:port" under torchrun, through ddpjob.init().

torch's own init_process_group hangs here (2.13): under torchrun every rank connects as a client, but no process serves
the store at a port other than torchrun's. With ddpjob.init() rank 0 serves it.
"""

import argparse

import common

import ddpjob


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dist-url", required=True, help="tcp://host:port; the port is not torchrun's own")
    with ddpjob.init("gloo", init_method=parser.parse_args().dist_url):
        common.train()


if __name__ == "__main__":
    main()
