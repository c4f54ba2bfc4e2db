"""Writes a GGUF file with all tensors of another one decoded to F32, and its metadata.

    /tmp/venv/bin/python decoded.py model.gguf /tmp/f32.gguf    # the environment: goldens.py
    LEANATTENTION_GGUF=model.gguf,/tmp/f32.gguf go test -run Files
"""

import sys

import gguf


def main():
    source, path = sys.argv[1], sys.argv[2]
    r = gguf.GGUFReader(source)
    arch = r.fields["general.architecture"].contents()
    w = gguf.GGUFWriter(path, arch)
    for key, field in r.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        value = field.contents()
        if key == "general.file_type":
            value = int(gguf.LlamaFileType.ALL_F32)
        if kind == gguf.GGUFValueType.ARRAY:
            w.add_key_value(key, value, kind, sub_type=field.types[-1])
        else:
            w.add_key_value(key, value, kind)
    for t in r.tensors:
        shape = [int(d) for d in reversed(t.shape)]
        w.add_tensor(t.name, gguf.quants.dequantize(t.data, t.tensor_type).reshape(shape).astype("<f4"))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


main()
