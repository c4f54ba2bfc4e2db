package gguf

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"
)

// readAll reads all values of a file, and all tensors by rows into a fixed buffer. It returns the first error. It fails
// the test if the file's sizes contradict each other.
func readAll(t testing.TB, f *File, size int) error {
	m := f.Metadata()
	for _, key := range m.Keys() {
		if _, err := m.Any(key); err != nil {
			return err
		}
		for _, get := range []func() error{
			func() error { _, err := m.Int(key); return err },
			func() error { _, err := m.Float64(key); return err },
			func() error { _, err := m.Strings(key); return err },
			func() error { _, err := m.Ints(key); return err },
			func() error { _, err := m.Float32s(key); return err },
			func() error { _, err := m.Bools(key); return err },
		} {
			_ = get()
		}
	}
	if left := m.Unread(); len(left) != 0 {
		t.Errorf("keys %q are unread", left)
	}
	bytes := 0
	for _, x := range f.Tensors() {
		product := 1
		for _, n := range x.Shape() {
			product *= n
		}
		if product != x.Rows()*x.Columns() || product <= 0 || x.Rows()*x.RowBytes() != x.Bytes() || x.Bytes() != len(x.data) {
			t.Fatalf("%q: shape %v, %d rows of %d, %d bytes", x.Name(), x.Shape(), x.Rows(), x.Columns(), x.Bytes())
		}
		bytes += x.Bytes()
		row, half := make([]float32, x.Columns()), make([]uint16, x.Columns())
		for i := range min(x.Rows(), 8) {
			if err := x.Float32(row, i, i+1); err != nil {
				return err
			}
			if err := x.BFloat16(half, i, i+1); err != nil {
				return err
			}
			_ = x.Float16(half, i, i+1)
		}
	}
	_, _ = f.Config()
	_, _ = f.Adapter(2, 1)
	weights, _ := f.Weights()
	for _, w := range weights {
		row := make([]float32, w.Columns())
		if err := w.Float32(row, w.Rows()-1, w.Rows()); err != nil {
			return err
		}
	}
	if bytes > size {
		t.Fatalf("tensors have %d bytes, and the file has %d", bytes, size)
	}
	return nil
}

// readBounded parses and reads a file. It fails the test if memory or time is not proportional to the file's size.
func readBounded(t testing.TB, data []byte) (err error) {
	var f *File
	// A key of 14 bytes becomes a value, a map entry and a string. Map and slice grow by doubling.
	bounded(t, len(data), 24, func() { f, err = Parse("hostile.gguf", data) })
	if err != nil {
		return err
	}
	// An array of 12 bytes becomes a slice in an interface, which is an element of a slice.
	bounded(t, len(data), 8, func() {
		for _, key := range f.meta.keys {
			if _, err = f.meta.Any(key); err != nil {
				return
			}
		}
	})
	if err == nil {
		err = readAll(t, f, len(data))
	}
	return err
}

// bounded fails the test if f allocates more than times bytes for each byte of the file, or runs for more than 5
// seconds.
func bounded(t testing.TB, size, times int, f func()) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := time.Now()
	f()
	took := time.Since(began)
	runtime.ReadMemStats(&after)
	if got, most := after.TotalAlloc-before.TotalAlloc, uint64(times*size+1<<16); got > most {
		t.Errorf("a file of %d bytes took %d bytes of memory, more than %d", size, got, most)
	}
	if took > 5*time.Second {
		t.Errorf("a file of %d bytes took %v", size, took)
	}
}

// damage returns a copy of a file with one random corruption.
func damage(r *rand.Rand, whole []byte) []byte {
	b := slices.Clone(whole)
	header := min(len(b), 2500) // most checks are of the header
	huge := []uint64{0, 1, 1 << 20, 1<<31 - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 60, 1 << 61, 1<<62 + 1, 1 << 63, math.MaxUint64 - 7, math.MaxUint64}
	switch r.IntN(6) {
	case 0: // truncate
		b = b[:r.IntN(len(b))]
	case 1: // flip a bit
		b[r.IntN(len(b))] ^= 1 << r.IntN(8)
	case 2: // overwrite bytes of the header
		for range 1 + r.IntN(8) {
			b[r.IntN(header)] = byte(r.Uint32())
		}
	case 3: // overwrite a count or length
		binary.LittleEndian.PutUint64(b[r.IntN(header-8):], huge[r.IntN(len(huge))])
	case 4: // overwrite a kind, type or 32-bit count
		binary.LittleEndian.PutUint32(b[r.IntN(header-4):], uint32(huge[r.IntN(len(huge))]))
	case 5: // delete or duplicate a part
		i := r.IntN(header)
		j := i + r.IntN(header-i)
		if r.IntN(2) == 0 {
			b = slices.Delete(b, i, j)
		} else {
			b = slices.Insert(b, j, slices.Clone(b[i:j])...)
		}
	}
	return b
}

func TestDamagedFiles(t *testing.T) {
	golden, err := os.ReadFile("testdata/types.gguf")
	if err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	defer func() {
		if t.Failed() {
			t.Log("seed", seed)
		}
	}()
	r := rand.New(rand.NewPCG(seed, 0))
	dir := t.TempDir()
	family, err := os.ReadFile("testdata/families/llama-biases.gguf")
	if err != nil {
		t.Fatal(err)
	}
	good, bad := [][]byte{golden, sound(3, 0).encode(), sound(2, 8).encode(), family}, 0
	for i := range 1000 {
		data := damage(r, good[i%len(good)])
		if readBounded(t, data) != nil {
			bad++
		}
		if i%10 != 0 {
			continue
		}
		name := filepath.Join(dir, fmt.Sprint(i, ".gguf"))
		if err := os.WriteFile(name, data, 0o666); err != nil {
			t.Fatal(err)
		}
		if f, err := Open(name); err == nil {
			_ = readAll(t, f, len(data))
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	// Many corruptions change metadata values or weights, and leave the file valid.
	if bad < 300 {
		t.Errorf("%d of 1000 damaged files are errors", bad)
	}
	t.Logf("%d of 1000 damaged files are errors", bad)
}

// The files have the largest counts that their sizes allow.
func TestForgedFiles(t *testing.T) {
	const size = 1 << 20
	array := func(kind Kind, n uint64, data []byte) []byte {
		b := append([]byte("GGUF"), u32(3)...)
		b = append(append(b, u64(0)...), u64(1)...)
		b = append(append(b, str("k")...), u32(uint32(Array))...)
		return append(append(append(b, u32(uint32(kind))...), u64(n)...), data...)
	}
	var nested []byte // empty arrays
	for range size / 12 {
		nested = append(append(nested, u32(uint32(Array))...), u64(0)...)
	}
	keys := append(append(append([]byte("GGUF"), u32(3)...), u64(0)...), u64(maxKeys)...)
	for i := range maxKeys {
		keys = append(append(append(keys, str(fmt.Sprint(i))...), u32(uint32(Uint8))...), 0)
	}
	var tensors contents
	tensors.version = 3
	tensors.alignment = 1
	for i := range 1 << 14 {
		tensors.tensors = append(tensors.tensors, written{name: fmt.Sprint(i), shape: []uint64{1, 1, 1, 1}, typ: F16, data: make([]byte, 2)})
	}
	for name, data := range map[string][]byte{
		"empty strings": array(String, size/8, make([]byte, size)),
		"bytes":         array(Uint8, size, make([]byte, size)),
		"bools":         array(Bool, size, make([]byte, size)),
		"no arrays":     array(Array, size/12, nested),
		"keys":          keys,
		"tensors":       tensors.encode(),
	} {
		if err := readBounded(t, data); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for depth := range uint64(3) { // each depth has the same lengths, so lengths must not be multiplied
		data := array(Array, size/12+depth, nested)
		if err := readBounded(t, data); (err != nil) != (depth > 0) {
			t.Errorf("%d arrays too many: %v", depth, err)
		}
	}
}

func FuzzOpen(f *testing.F) {
	golden, err := os.ReadFile("testdata/types.gguf")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(golden[:4096])
	for _, version := range []uint32{1, 2, 3, 3 << 24} {
		for _, alignment := range []int{0, 1, 8, 64} {
			f.Add(sound(version, alignment).encode())
		}
	}
	_, parts := splitFiles(2, nil)
	f.Add(parts[0])
	f.Add(parts[1])
	for _, p := range allKinds {
		f.Add(contents{version: 3, keys: []pair{p}}.encode())
	}
	for typ := range Type(42) {
		size := 512
		if l, ok := layouts[typ]; ok {
			size = 256 / l.elements * l.bytes
		}
		f.Add(contents{version: 3, tensors: []written{{name: "w", shape: []uint64{256}, typ: typ, data: make([]byte, size)}}}.encode())
	}
	for architecture := range families {
		c := model(architecture).with(
			written{name: "blk.0.attn_q.weight", shape: []uint64{16, 16}, typ: F32, data: make([]byte, 1024)},
			written{name: "blk.0.attn_q.bias", shape: []uint64{16}, typ: F32, data: make([]byte, 64)},
			written{name: "rope_freqs.weight", shape: []uint64{2}, typ: F32, data: floats(1, 1)})
		f.Add(c.encode())
	}
	r := rand.New(rand.NewPCG(7, 8))
	for range 30 {
		f.Add(damage(r, sound(3, 0).encode()))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse("fuzz.gguf", data)
		if (file == nil) == (err == nil) {
			t.Fatalf("%v, %v", file, err)
		}
		if err == nil {
			if err := readAll(t, file, len(data)); err != nil {
				t.Error(err)
			}
		}
	})
}
