package gguf

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// contents describes a GGUF file to write.
type contents struct {
	version   uint32
	keys      []pair
	tensors   []written
	alignment int // 0: the default, and no key

	// Wrong counts to write; 0: the right count.
	tensorCount, keyCount uint64
}

type pair struct {
	key   string
	value any // a Go value of its kind's name, a slice of such values, or []any for an array of arrays
}

type written struct {
	name  string
	shape []uint64 // row-major
	typ   Type
	data  []byte
	at    int64 // the offset; negative: directly after the tensor before
}

// encode returns the bytes of the file.
func (f contents) encode() []byte {
	keys := f.keys
	alignment := defaultAlignment
	if f.alignment != 0 {
		alignment = f.alignment
		keys = append([]pair{{alignmentKey, uint32(f.alignment)}}, keys...)
	}
	pad := func(b []byte) []byte { return append(b, make([]byte, (alignment-len(b)%alignment)%alignment)...) }

	b := append([]byte("GGUF"), u32(f.version)...)
	if f.tensorCount == 0 {
		f.tensorCount = uint64(len(f.tensors))
	}
	if f.keyCount == 0 {
		f.keyCount = uint64(len(keys))
	}
	b = append(append(b, u64(f.tensorCount)...), u64(f.keyCount)...)
	for _, p := range keys {
		kind, data := encodeValue(p.value)
		b = append(append(append(b, str(p.key)...), u32(uint32(kind))...), data...)
	}
	var data []byte
	for _, t := range f.tensors {
		b = append(append(b, str(t.name)...), u32(uint32(len(t.shape)))...)
		for i := range t.shape {
			b = append(b, u64(t.shape[len(t.shape)-1-i])...)
		}
		data = pad(data)
		at := uint64(len(data))
		if t.at > 0 {
			at = uint64(t.at)
		}
		b = append(append(b, u32(uint32(t.typ))...), u64(at)...)
		data = append(data, t.data...)
	}
	if len(f.tensors) == 0 {
		return b
	}
	return append(pad(b), data...)
}

func u32(x uint32) []byte { return binary.LittleEndian.AppendUint32(nil, x) }
func u64(x uint64) []byte { return binary.LittleEndian.AppendUint64(nil, x) }
func str(s string) []byte { return append(u64(uint64(len(s))), s...) }

// kindOf returns the metadata kind of the values of a Go type.
func kindOf(t reflect.Type) Kind {
	switch t.Kind() {
	case reflect.Slice, reflect.Interface:
		return Array
	}
	for k, name := range kinds {
		if name.name == t.Kind().String() {
			return Kind(k)
		}
	}
	panic(fmt.Sprint("no kind of ", t))
}

// encodeValue returns a value's bytes in the file, without the kind.
func encodeValue(x any) (Kind, []byte) {
	v := reflect.ValueOf(x)
	kind := kindOf(v.Type())
	switch x := x.(type) {
	case string:
		return kind, str(x)
	case bool:
		if x {
			return kind, []byte{1}
		}
		return kind, []byte{0}
	case float32:
		return kind, u32(math.Float32bits(x))
	case float64:
		return kind, u64(math.Float64bits(x))
	}
	if kind != Array {
		b, err := binary.Append(nil, binary.LittleEndian, x)
		if err != nil {
			panic(err)
		}
		return kind, b
	}
	elem := kindOf(v.Type().Elem())
	b := append(u32(uint32(elem)), u64(uint64(v.Len()))...)
	for i := range v.Len() {
		_, data := encodeValue(v.Index(i).Interface())
		b = append(b, data...)
	}
	return kind, b
}

// floats returns the bytes of F32 numbers.
func floats(x ...float32) []byte {
	var b []byte
	for _, x := range x {
		b = append(b, u32(math.Float32bits(x))...)
	}
	return b
}

// save writes files into a new folder, and returns the path of the first file.
func save(t testing.TB, names []string, files ...[]byte) string {
	t.Helper()
	dir := t.TempDir()
	for i, name := range names {
		if err := os.WriteFile(filepath.Join(dir, name), files[i], 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, names[0])
}

// allKinds has a value and an array of each kind.
var allKinds = []pair{
	{"general.architecture", "llama"},
	{"a.uint8", uint8(200)}, {"a.int8", int8(-100)}, {"a.uint16", uint16(60000)}, {"a.int16", int16(-30000)},
	{"a.uint32", uint32(4e9)}, {"a.int32", int32(-2e9)}, {"a.uint64", uint64(math.MaxUint64)}, {"a.int64", int64(math.MinInt64)},
	{"a.float32", float32(0.1)}, {"a.float64", 0.1}, {"a.bool", true}, {"a.false", false}, {"a.string", "grüße"}, {"a.empty", ""},
	{"s.uint8", []uint8{1, 255}}, {"s.int8", []int8{-1, 1}}, {"s.uint16", []uint16{1, 65535}}, {"s.int16", []int16{-1, 1}},
	{"s.uint32", []uint32{1, math.MaxUint32}}, {"s.int32", []int32{-1, 1}}, {"s.uint64", []uint64{1, math.MaxUint64}}, {"s.int64", []int64{-1, 1}},
	{"s.float32", []float32{1, -0.5}}, {"s.float64", []float64{1, -0.5}}, {"s.bool", []bool{true, false}}, {"s.string", []string{"a", "", "ß"}},
	{"s.empty", []int32{}}, {"s.nested", []any{[]int32{1, 2}, []string{"x"}, []any{[]uint8{}}}},
}

// sound returns a valid file with all kinds of values and three tensors.
func sound(version uint32, alignment int) contents {
	return contents{version: version, alignment: alignment, keys: allKinds, tensors: []written{
		{name: "token_embd.weight", shape: []uint64{3, 2}, typ: F32, data: floats(1, 2, 3, 4, 5, 6)},
		{name: "norm.weight", shape: []uint64{4}, typ: F16, data: []byte{0, 0x3c, 0, 0xc0, 1, 0, 0, 0x7c}},
		{name: "blk.0.weight", shape: []uint64{1, 2, 32}, typ: Q8_0, data: make([]byte, 68)},
	}}
}
