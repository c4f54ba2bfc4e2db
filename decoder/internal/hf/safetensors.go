package hf

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/leanattention/decoder/internal/files"
)

// maxHeader is the maximum length of a header in the format.
const maxHeader = 100 << 20

// headerLimits allows maxTensors tensors and their shapes.
var headerLimits = files.Limits{Values: 1 << 20, Depth: 3}

// tensorJSON is the JSON object of a tensor in a header.
type tensorJSON struct {
	DType          string
	Shape, Offsets []uint64
}

func (t *tensorJSON) decode(dec *json.Decoder) error {
	fields := map[string]any{"dtype": &t.DType, "shape": &t.Shape, "data_offsets": &t.Offsets}
	if open, err := dec.Token(); err != nil || open != json.Delim('{') {
		return errors.New("not a JSON object")
	}
	for dec.More() {
		token, err := dec.Token()
		if err != nil {
			return err
		}
		key := token.(string)
		field := fields[key]
		if field == nil {
			return fmt.Errorf("key %s is none of dtype, shape and data_offsets, or is there twice", quote(key))
		}
		if err := dec.Decode(field); err != nil {
			return err
		}
		delete(fields, key)
	}
	_, err := dec.Token()
	return err
}

// parseSafetensors lists the tensors of a safetensors file:
//
//	8 bytes   length of the header, little endian
//	header    {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
//	data      offsets count from its first byte
//
// As the format requires, the tensors must cover all of the data without overlaps or gaps. Each tensor must have each
// of its three keys once, and no other key.
//
// The entries alias data. Memory is proportional to the header.
func parseSafetensors(file string, data []byte) ([]entry, error) {
	if len(data) < 8 {
		return nil, fail(ErrFormat, file, "%d bytes, too short for a safetensors file", len(data))
	}
	length, data := binary.LittleEndian.Uint64(data), data[8:]
	if length > maxHeader || length > uint64(len(data)) {
		return nil, fail(ErrFormat, file, "a header of %d bytes is claimed, and %d bytes (at most %d) can be one", length, len(data), maxHeader)
	}
	header, data := data[:length], data[length:]

	if err := headerLimits.Check(header); err != nil {
		return nil, fail(ErrFormat, file, "header: %v", err)
	}
	dec := json.NewDecoder(bytes.NewReader(header))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, fail(ErrFormat, file, "the header is not a JSON object")
	}
	type located struct {
		entry
		begin, end uint64
	}
	var found []located
	seen := map[string]bool{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, fail(ErrFormat, file, "header: %v", err)
		}
		name := t.(string) // the decoder allows only strings as keys
		if seen[name] {
			return nil, fail(ErrFormat, file, "tensor %s is there twice", quote(name))
		}
		seen[name] = true
		if name == "__metadata__" {
			var text map[string]string
			if err := dec.Decode(&text); err != nil {
				return nil, fail(ErrFormat, file, "__metadata__: %v", err)
			}
			continue
		}
		var d tensorJSON
		if err := d.decode(dec); err != nil {
			return nil, fail(ErrFormat, file, "tensor %s: %v", quote(name), err)
		}
		size, known := elementBytes[dtype(d.DType)]
		count, fits := product(d.Shape)
		switch {
		case !known:
			return nil, fail(ErrUnsupported, file, "tensor %s: unknown dtype %s", quote(name), quote(d.DType))
		case d.Shape == nil:
			return nil, fail(ErrFormat, file, "tensor %s has no shape", quote(name))
		case len(d.Offsets) != 2:
			return nil, fail(ErrFormat, file, "tensor %s has %d data_offsets, not 2", quote(name), len(d.Offsets))
		}
		begin, end := d.Offsets[0], d.Offsets[1]
		if begin > end || end > uint64(len(data)) {
			return nil, fail(ErrFormat, file, "tensor %s lies at [%d, %d) of %d bytes of data", quote(name), begin, end, len(data))
		}
		if held := int(end - begin); !fits || held%size != 0 || count != held/size {
			return nil, fail(ErrFormat, file, "tensor %s: %s %s does not fill its %d bytes", quote(name), d.DType, dims(d.Shape), held)
		}
		found = append(found, located{
			entry{name: name, file: file, dtype: dtype(d.DType), shape: ints(d.Shape), data: data[begin:end:end]}, begin, end,
		})
	}
	if _, err := dec.Token(); err != nil {
		return nil, fail(ErrFormat, file, "header: %v", err)
	}
	if rest := bytes.TrimLeft(header[dec.InputOffset():], " \t\r\n"); len(rest) != 0 {
		return nil, fail(ErrFormat, file, "the JSON object of the header is followed by %d bytes", len(rest))
	}

	slices.SortFunc(found, func(a, b located) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end, b.end))
	})
	entries, at := make([]entry, len(found)), uint64(0)
	for i, t := range found {
		switch {
		case t.begin < at:
			return nil, fail(ErrFormat, file, "tensors %s and %s overlap", quote(found[i-1].name), quote(t.name))
		case t.begin > at:
			return nil, fail(ErrFormat, file, "no tensor has the %d bytes before tensor %s", t.begin-at, quote(t.name))
		}
		entries[i], at = t.entry, t.end
	}
	if at != uint64(len(data)) {
		return nil, fail(ErrFormat, file, "no tensor has the last %d bytes", uint64(len(data))-at)
	}
	return entries, nil
}
