"""The command kaiyuan, whose training processes are those of spy_rank.py."""

from kaiyuan import cli, train

plain = train.Nodes.command


def command(self):
    return ["tests.spy_rank" if word == "kaiyuan.rank" else word for word in plain(self)]


if __name__ == "__main__":
    train.Nodes.command = command
    cli.main()
