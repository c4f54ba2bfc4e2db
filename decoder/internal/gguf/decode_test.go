package gguf

import (
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/weight"
)

// same reports whether two numbers have the same bits, or are both NaN.
func same(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

// same16 is like same, for a 16-bit type with the given infinity.
func same16(infinity uint16) func(a, b uint16) bool {
	return func(a, b uint16) bool { return a == b || a&0x7fff > infinity && b&0x7fff > infinity }
}

// all decodes a whole tensor.
func all(t testing.TB, x *Tensor) []float32 {
	t.Helper()
	s := make([]float32, x.Rows()*x.Columns())
	if err := x.Float32(s, 0, x.Rows()); err != nil {
		t.Fatal(err)
	}
	return s
}

// compare decodes a tensor and compares the result's bits with want.
func compare(t *testing.T, x *Tensor, want []float32) {
	t.Helper()
	got := all(t, x)
	if len(got) != len(want) {
		t.Errorf("%s: %d elements, want %d", x.Name(), len(got), len(want))
		return
	}
	different := 0
	for i := range got {
		if !same(got[i], want[i]) {
			if different == 0 {
				t.Errorf("%s, %v: element %d is %g (%x), want %g (%x)", x.Name(), x.Type(), i, got[i], math.Float32bits(got[i]), want[i], math.Float32bits(want[i]))
			}
			different++
		}
	}
	if different > 1 {
		t.Errorf("%s: %d of %d elements differ", x.Name(), different, len(got))
	}
}

// testPairs compares each tensor NAME with the tensor NAME.f32 of the same file. It returns the types that it compared.
func testPairs(t *testing.T, f *File) map[Type]int {
	types := map[Type]int{}
	for _, x := range f.Tensors() {
		if strings.HasSuffix(x.Name(), ".f32") {
			continue
		}
		want, err := f.Tensor(x.Name() + ".f32")
		if err != nil {
			t.Fatal(err)
		}
		compare(t, x, all(t, want))
		types[x.Type()] += x.Rows() * x.Columns()
	}
	return types
}

// testdata/types.gguf was written and decoded by ggml's Python package, with testdata/goldens.py.
func TestGoldens(t *testing.T) {
	f, err := Open("testdata/types.gguf")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if types := testPairs(t, f); len(types) != len(layouts) {
		t.Errorf("types %v, want all %d", types, len(layouts))
	}
	for _, p := range []pair{
		{"general.architecture", "types"},
		{"kinds.uint8", uint8(200)}, {"kinds.int8", int8(-100)}, {"kinds.uint16", uint16(60000)}, {"kinds.int16", int16(-30000)},
		{"kinds.uint32", uint32(4e9)}, {"kinds.int32", int32(-2e9)}, {"kinds.uint64", uint64(1 << 63)}, {"kinds.int64", int64(-1 << 62)},
		{"kinds.float32", float32(0.1)}, {"kinds.float64", 0.1}, {"kinds.bool", true}, {"kinds.string", "grüße"},
		{"kinds.strings", []string{"a", "", "ß"}}, {"kinds.ints", []int32{1, -2, 3}}, {"kinds.floats", []float32{0.5, -0.25}},
		{"kinds.bools", []bool{true, false}}, {"kinds.nested", []any{[]int32{1, 2}, []int32{3}}},
	} {
		if got, err := f.Metadata().Any(p.key); err != nil || !reflect.DeepEqual(got, p.value) {
			t.Errorf("%s: %#v, %v, want %#v", p.key, got, err, p.value)
		}
	}
	if left := f.Metadata().Unread(); len(left) != 0 {
		t.Errorf("keys %v are not compared", left)
	}
}

// LEANATTENTION_GGUF names one of:
//
//   - a file written by testdata/goldens.py,
//   - a model, a comma, and the same model decoded by testdata/decoded.py.
func TestFiles(t *testing.T) {
	paths, ok := os.LookupEnv("LEANATTENTION_GGUF")
	if !ok {
		t.Skip("LEANATTENTION_GGUF names no file: see testdata/goldens.py and testdata/decoded.py")
	}
	path, decoded, two := strings.Cut(paths, ",")
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if !two {
		t.Log("elements of each type:", testPairs(t, f))
		return
	}
	g, err := Open(decoded)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	types := map[Type]int{}
	for _, x := range f.Tensors() {
		want, err := g.Tensor(x.Name())
		if err != nil {
			t.Error(err)
			continue
		}
		if want.Type() != F32 || !slices.Equal(x.Shape(), want.Shape()) {
			t.Errorf("%s is %v, want %v, %v", x.Name(), x.Shape(), want.Shape(), want.Type())
		}
		compare(t, x, all(t, want))
		types[x.Type()] += x.Rows() * x.Columns()
	}
	if len(f.Tensors()) != len(g.Tensors()) {
		t.Errorf("%d tensors, want %d", len(f.Tensors()), len(g.Tensors()))
	}
	t.Logf("%d tensors; elements of each type: %v", len(f.Tensors()), types)
}

// TestDecoders compares the decoders with the definitions of the formats. The definitions are computed one element at a
// time, and in float64 where float64 is exact.
func TestDecoders(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	bit := func(b []byte, i int) int { return int(b[i/8] >> (i % 8) & 1) }
	nibble := func(b []byte, i int) int { return int(b[i%16] >> (i / 16 * 4) & 15) }
	scale := func(b []byte) float32 { return float32(exact16(uint16(b[0]) | uint16(b[1])<<8)) }
	// The 12 bytes have 8 scales of 6 bits each, and then 8 minima.
	six := func(b []byte, i int) (s, m float32) {
		if i < 4 {
			return float32(b[i] % 64), float32(b[i+4] % 64)
		}
		return float32(int(b[i+4])%16 + int(b[i-4])/64*16), float32(int(b[i+4])/16 + int(b[i])/64*16)
	}
	for typ, element := range map[Type]func(b []byte, i int) float32{
		Q8_0: func(b []byte, i int) float32 { return scale(b) * float32(int8(b[2+i])) },
		Q4_0: func(b []byte, i int) float32 { return scale(b) * float32(nibble(b[2:], i)-8) },
		Q4_1: func(b []byte, i int) float32 { return float32(scale(b)*float32(nibble(b[4:], i))) + scale(b[2:]) },
		Q5_0: func(b []byte, i int) float32 {
			return scale(b) * float32(nibble(b[6:], i)+16*bit(b[2:], i)-16)
		},
		Q5_1: func(b []byte, i int) float32 {
			return float32(scale(b)*float32(nibble(b[8:], i)+16*bit(b[4:], i))) + scale(b[2:])
		},
		Q4_K: func(b []byte, i int) float32 {
			s, m := six(b[4:], i/32)
			q := b[16+i/64*32+i%32] >> (i / 32 % 2 * 4) & 15
			return float32(scale(b)*s*float32(q)) - scale(b[2:])*m
		},
		Q5_K: func(b []byte, i int) float32 {
			s, m := six(b[4:], i/32)
			q := int(b[48+i/64*32+i%32]>>(i/32%2*4)&15) + 16*bit(b[16+i%32:], i/32)
			return float32(scale(b)*s*float32(q)) - scale(b[2:])*m
		},
		Q6_K: func(b []byte, i int) float32 {
			half, run, at := i/128, i/32%4, i%32
			low := int(b[64*half+32*(run%2)+at] >> (run / 2 * 4) & 15)
			high := int(b[128+32*half+at] >> (2 * run) & 3)
			return scale(b[208:]) * float32(int8(b[192+i/16])) * float32(low+16*high-32)
		},
	} {
		l := layouts[typ]
		src := make([]byte, 500*l.bytes)
		for i := range src {
			src[i] = byte(r.Uint32())
		}
		got := make([]float32, 500*l.elements)
		l.decode(got, src)
		for i := range got {
			want := element(src[i/l.elements*l.bytes:][:l.bytes], i%l.elements)
			if !same(got[i], want) {
				t.Fatalf("%v: element %d is %g, want %g", typ, i, got[i], want)
			}
		}
	}
}

// exact16 returns a binary16 number by the definition of IEEE 754.
func exact16(h uint16) float64 {
	exponent, fraction := int(h>>10&31), float64(h&0x3ff)
	x := math.Ldexp(1024+fraction, exponent-25)
	switch {
	case exponent == 0:
		x = math.Ldexp(fraction, -24)
	case exponent == 31 && fraction == 0:
		x = math.Inf(1)
	case exponent == 31:
		x = math.NaN()
	}
	if h&0x8000 != 0 {
		x = -x
	}
	return x
}

func TestByteOrder(t *testing.T) {
	if runtime.GOARCH == "amd64" && !littleEndian {
		t.Error("amd64 is little endian")
	}
}

func TestFrom16(t *testing.T) {
	for i := range 1 << 16 {
		if got, want := from16(uint16(i)), float32(exact16(uint16(i))); !same(got, want) {
			t.Fatalf("%#04x is %g, want %g", i, got, want)
		}
	}
}

// A number rounds to the nearer of its two neighbours, or to the even one.
func TestRounding(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for name, f := range map[string]struct {
		to   func([]uint16, []float32) int
		from func(uint16) float64
		inf  uint16
	}{
		"float16":  {binary16.round, exact16, 0x7c00},
		"bfloat16": {bfloat16.round, func(b uint16) float64 { return float64(math.Float32frombits(uint32(b) << 16)) }, 0x7f80},
	} {
		// half is exact in float64. The neighbour above the largest number is the next power of two.
		value := func(b uint16) float64 {
			if b == f.inf {
				return 2 * (f.from(f.inf-1) - f.from(f.inf-1)/2 + (f.from(f.inf-1)-f.from(f.inf-2))/2)
			}
			return f.from(b)
		}
		check := func(x float32) {
			var got [1]uint16
			bad := f.to(got[:], []float32{x})
			switch {
			case x != x:
				if bad >= 0 || !math.IsNaN(f.from(got[0])) {
					t.Errorf("%s of NaN %x: %x", name, math.Float32bits(x), got[0])
				}
				return
			case math.IsInf(float64(x), 0):
				if bad >= 0 || f.from(got[0]) != float64(x) {
					t.Errorf("%s of %g: %x", name, x, got[0])
				}
				return
			}
			a := math.Abs(float64(x))
			n := uint16(0) // the largest number that does not exceed a
			for step := uint16(1) << 14; step > 0; step >>= 1 {
				if n+step < f.inf && value(n+step) <= a {
					n += step
				}
			}
			low, high := a-value(n), value(n+1)-a
			want := n
			if high < low || high == low && n%2 == 1 {
				want = n + 1
			}
			if want == f.inf {
				if bad != 0 {
					t.Errorf("%s of %g has no error", name, x)
				}
				return
			}
			if math.Signbit(float64(x)) {
				want |= 0x8000
			}
			if bad >= 0 || got[0] != want {
				t.Errorf("%s of %g (%x) is %x, want %x", name, x, math.Float32bits(x), got[0], want)
			}
		}
		for range 100000 {
			check(math.Float32frombits(r.Uint32()))
			check(float32(math.Ldexp(r.Float64()*2-1, r.IntN(48)-28)))
		}
		for h := range int(f.inf) {
			a := f.from(uint16(h))
			middle := float32((a + value(uint16(h)+1)) / 2) // exact
			for _, x := range []float32{float32(a), middle, math.Nextafter32(middle, 0), math.Nextafter32(middle, math.MaxFloat32)} {
				check(x)
				check(-x)
			}
		}
		for _, x := range []float64{math.Inf(1), math.Inf(-1), math.NaN(), math.MaxFloat32, math.Copysign(0, -1)} {
			check(float32(x))
		}
		check(math.Float32frombits(0x7f800001))
	}
	// A NaN becomes quiet, and keeps the upper bits of its payload.
	nan := []float32{math.Float32frombits(0xff802001)}
	for _, c := range []struct {
		f    format
		want uint16
	}{{binary16, 0xfe01}, {bfloat16, 0xffc0}} {
		var got [1]uint16
		if bad := c.f.round(got[:], nan); bad != -1 || got[0] != c.want {
			t.Errorf("a NaN is %x, %d, want %x", got[0], bad, c.want)
		}
	}
}

// Many numbers round like each alone, for any values and any alignment. TestRounding tests the values.
func TestRoundMany(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	var src struct {
		_ [0]uint64
		x [67]float32
	}
	number := func() float32 {
		switch r.IntN(8) {
		case 0:
			return math.Float32frombits(r.Uint32())
		case 1:
			return float32(math.Copysign(0, float64(r.IntN(2))-0.5))
		case 2: // near the smallest and largest numbers
			return math.Float32frombits([]uint32{normal16, overflow16, infinity, overflowB}[r.IntN(4)] + uint32(r.IntN(5)) - 2 | uint32(r.IntN(2))<<31)
		}
		return float32(r.NormFloat64())
	}
	for i := range 20000 {
		for j := range src.x {
			if src.x[j] = number(); i%2 == 0 { // no number overflows, so all are rounded
				src.x[j] = float32(r.NormFloat64() * math.Exp(r.NormFloat64()*8-12))
			}
		}
		from := r.IntN(4)
		x := src.x[from : from+r.IntN(len(src.x)-from)]
		for _, f := range []struct{ all, one func([]uint16, []float32) int }{{binary16.round, toFloat16One}, {bfloat16.round, toBFloat16One}} {
			at := r.IntN(2)
			got, want := make([]uint16, 70)[at:], make([]uint16, 70)
			bad := f.one(want, x)
			if b := f.all(got, x); b != bad || bad < 0 && !slices.Equal(got[:len(x)], want[:len(x)]) {
				t.Fatalf("%v from %d: %d, want %d\n%x\n%x", x, from, b, bad, got, want)
			}
		}
	}
}

// rowsOf returns a tensor of random rows.
func rowsOf(t testing.TB, r *rand.Rand, typ Type, rows, columns int) *Tensor {
	l := layouts[typ]
	data := make([]byte, rows*columns/l.elements*l.bytes)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	c := contents{version: 3, tensors: []written{{name: "w", shape: []uint64{uint64(rows), uint64(columns)}, typ: typ, data: data}}}
	return mustParse(t, c.encode()).Tensors()[0]
}

// Any range of rows equals that part of the whole tensor, in all three types and for any number of goroutines.
func TestRanges(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for typ := range layouts {
		for _, shape := range [][2]int{{3, 256}, {700, 768}, {2, 1 << 17}} {
			x := rowsOf(t, r, typ, shape[0], shape[1])
			all := make([]float32, shape[0]*shape[1])
			x.layout.decode(all, x.data)
			for i := range 6 {
				from := r.IntN(x.Rows() + 1)
				to := from + r.IntN(x.Rows()+1-from)
				if i == 0 {
					from, to = 0, x.Rows()
				}
				want := all[from*shape[1] : to*shape[1]]
				got := make([]float32, len(want))
				if err := x.Float32(got, from, to); err != nil {
					t.Fatal(err)
				}
				for i := range got {
					if !same(got[i], want[i]) {
						t.Fatalf("%v: rows %d to %d of %d: element %d is %g, want %g", typ, from, to, x.Rows(), i, got[i], want[i])
					}
				}
				for name, f := range map[string]struct {
					widen  func([]uint16, int, int) error
					format format
					inf    uint16
				}{"Float16": {x.Float16, binary16, 0x7c00}, "BFloat16": {x.BFloat16, bfloat16, 0x7f80}} {
					got, rounded := make([]uint16, len(want)), make([]uint16, len(want))
					err, bad := f.widen(got, from, to), f.format.round(rounded, want)
					if typ == F16 && name == "Float16" || typ == BF16 && name == "BFloat16" { // copied, with NaN payloads
						for i := range got {
							if n := 2 * (from*shape[1] + i); got[i] != uint16(x.data[n])|uint16(x.data[n+1])<<8 {
								t.Fatalf("%v: element %d of a copy is %x", typ, i, got[i])
							}
						}
					} else if (bad >= 0) != errors.Is(err, ErrRange) || bad < 0 && (err != nil || !slices.EqualFunc(got, rounded, same16(f.inf))) {
						t.Fatalf("%s of %v, rows %d to %d: %v, with element %d too large", name, typ, from, to, err, bad)
					}
				}
			}
		}
	}
}

func TestOverflow(t *testing.T) {
	data := make([]float32, 300*256)
	data[1000] = 65519.99 // the largest number that rounds to a finite one
	data[2000] = float32(math.Inf(-1))
	tensor := func() *Tensor {
		c := contents{version: 3, tensors: []written{{name: "blk.7.ffn_up.weight", shape: []uint64{300, 256}, typ: F32, data: floats(data...)}}}
		return mustParse(t, c.encode()).Tensors()[0]
	}
	dst := make([]uint16, len(data))
	if err := tensor().Float16(dst, 0, 300); err != nil || dst[1000] != 0x7bff || dst[2000] != 0xfc00 {
		t.Errorf("%v, %x, %x", err, dst[1000], dst[2000])
	}
	data[70003] = -65520
	data[76799] = 1e9
	for range 5 {
		err := tensor().Float16(dst[256:], 1, 300)
		const want = `gguf: test.gguf: tensor "blk.7.ffn_up.weight" has -65520 at row 273, column 115, more than 16 bits of the requested type can be: use another type: out of range`
		if err == nil || err.Error() != want {
			t.Fatalf("%v, want %s", err, want)
		}
	}
	if err := tensor().BFloat16(dst, 0, 300); err != nil {
		t.Error(err)
	}
}

func TestBadRows(t *testing.T) {
	x := mustParse(t, sound(3, 0).encode()).Tensors()[0] // 3 rows of 2 columns
	for _, c := range []struct{ n, from, to int }{{2, -1, 0}, {2, 3, 4}, {0, 2, 1}, {3, 0, 1}, {4, 0, 1}, {0, math.MinInt, math.MaxInt}} {
		if err := x.Float32(make([]float32, c.n), c.from, c.to); !errors.Is(err, ErrShape) || !strings.Contains(err.Error(), `"token_embd.weight"`) {
			t.Errorf("%v: %v", c, err)
		}
		if err := x.Float16(make([]uint16, c.n), c.from, c.to); !errors.Is(err, ErrShape) {
			t.Errorf("%v: %v", c, err)
		}
	}
	if err := x.Float32(nil, 3, 3); err != nil {
		t.Errorf("no rows: %v", err)
	}
}

// TestTensorBlocks: rows in blocks mean what Float32 returns, are the file's own memory unless their order is another, and outlive
// Close while they are held.
func TestTensorBlocks(t *testing.T) {
	f, err := Open("testdata/types.gguf")
	if err != nil {
		t.Fatal(err)
	}
	formats := map[string]weight.Format{}
	for of := range weight.Format(weight.Formats) {
		formats[of.String()] = of
	}
	tried := 0
	for _, x := range f.Tensors() {
		of, ok := formats[x.Type().String()]
		if !x.HasBlocks() || !ok || x.Rows() < 2 {
			continue
		}
		tried++
		size := x.RowBytes()
		all, err := x.Blocks(0, x.Rows())
		if err != nil || len(all) != x.Bytes() || unsafe.SliceData(all) != unsafe.SliceData(x.data) {
			t.Errorf("%s: %d bytes, %v", x.Name(), len(all), err)
		}
		moved, last := *x, x.Rows()-1
		moved.source = func(row int) int { return last - row }
		for _, x := range []*Tensor{x, &moved} {
			data, err := x.Blocks(1, x.Rows())
			if err != nil || len(data) != (x.Rows()-1)*size {
				t.Fatalf("%s: %d bytes, %v", x.Name(), len(data), err)
			}
			want, got := make([]float32, (x.Rows()-1)*x.Columns()), make([]float32, (x.Rows()-1)*x.Columns())
			if err := x.Float32(want, 1, x.Rows()); err != nil {
				t.Fatal(err)
			}
			weight.Decode(of, got, unsafe.Pointer(unsafe.SliceData(data)))
			for i, v := range got {
				if math.Float32bits(v) != math.Float32bits(want[i]) && (v == v || want[i] == want[i]) {
					t.Fatalf("%s, %v: element %d is %v, want %v", x.Name(), of, i, v, want[i])
				}
			}
		}
		if _, err := x.Blocks(0, x.Rows()+1); !errors.Is(err, ErrShape) {
			t.Errorf("%s: more rows than there are: %v", x.Name(), err)
		}
	}
	if tried < 3 {
		t.Errorf("%d tensors have blocks", tried)
	}
	release, err := f.Hold()
	if err != nil {
		t.Fatal(err)
	}
	held := f.Tensors()[0].data[0]
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if f.Tensors()[0].data[0] != held {
		t.Error("the bytes changed")
	}
	if _, err := f.Hold(); !errors.Is(err, ErrClosed) {
		t.Errorf("Hold after Close: %v", err)
	}
	if err := release(); err != nil || f.parts[0].file.Bytes() != nil {
		t.Errorf("the file is mapped after its release: %v", err)
	}
}
