"""An independent reader of ROFS, for tests: written from the description, not the writer."""

import struct


def read_back(data):
    """Read a ROFS image as OSv's fs/rofs does, checking every bound; return path to content.

    A directory is None, a link a tuple of its target, a file its bytes.
    """
    magic, version, block, first, blocks, entries, links, inodes = struct.unpack_from("<8Q", data)
    assert (magic, version, block) == (0xDEADBEAD, 1, 512)
    assert len(data) == (first + blocks) * 512
    info, at = data[first * 512 : (first + blocks) * 512], 0
    names = []
    for _ in range(entries):
        number, length = struct.unpack_from("<QH", info, at)
        names.append((number, info[at + 10 : at + 10 + length]))
        assert len(names[-1][1]) == length
        at += 10 + length
    targets = []
    for _ in range(links):
        (length,) = struct.unpack_from("<H", info, at)
        targets.append(info[at + 2 : at + 2 + length])
        at += 2 + length
    table = [struct.unpack_from("<4Q", info, at + 32 * i) for i in range(inodes)]
    assert [number for _, number, _, _ in table] == list(range(1, inodes + 1))
    assert at + 32 * inodes <= len(info)
    assert not any(info[at + 32 * inodes :])
    found = {}

    def walk(number, path):
        mode, _, offset, count = table[number - 1]
        if mode == 0x4000:
            found[path or b"/"] = None
            assert offset + count <= len(names)
            for child, name in names[offset : offset + count]:
                walk(child, path + b"/" + name)
        elif mode == 0xA000:
            assert count == 1
            found[path] = (targets[offset],)
        else:
            assert mode == 0x8000
            content = data[offset * 512 : offset * 512 + count]
            assert len(content) == count
            assert offset + -(-count // 512) <= first
            found[path] = content

    walk(1, b"")
    return found
