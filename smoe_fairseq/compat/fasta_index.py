"""Keeps the names of data files from being run by a shell.

For fairseq 0.12.2 on any system. It indexes data sets of the kind ``fasta`` with a line of shell into
which the file's name is pasted as it is. A checkpoint's config chooses kind and name (data folder and
languages), so that a file named ``; rm -r x;.fasta`` beside a checkpoint would be enough. The same
numbers, counted in Python: where each description starts, and how long the sequence below it is.
"""

from types import ModuleType


def index_without_shell(fasta_dataset: ModuleType) -> None:
    import numpy as np

    def _build_index(self, path: str):
        offsets, lengths, position = [], [], 0
        with open(fasta_dataset.fasta_file_path(path), "rb") as file:
            for line in file:
                if line.startswith(b">"):
                    offsets.append(position)
                    lengths.append(0)
                elif lengths:
                    lengths[-1] += len(line.strip())
                position += len(line)
        return np.array(offsets, dtype=np.int64), np.array(lengths, dtype=np.int64)

    fasta_dataset.FastaDataset._build_index = _build_index
