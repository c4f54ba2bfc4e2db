package weight

import (
	"errors"
	"fmt"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
)

// Each format has a line in the table, and its decoding is that of its elements.
func TestFormats(t *testing.T) {
	want := []float32{1, -2, 0.5}
	stored := map[Format]unsafe.Pointer{
		Float32:  unsafe.Pointer(&[]float32{1, -2, 0.5}[0]),
		Float16:  unsafe.Pointer(&[]uint16{0x3c00, 0xc000, 0x3800}[0]),
		BFloat16: unsafe.Pointer(&[]uint16{0x3f80, 0xc000, 0x3f00}[0]),
	}
	for f := range Format(Formats) {
		if f.String() == "" || f.Bytes() < 1 || formats[f].dense && Dense(formats[f].element) != f {
			t.Errorf("format %d: %v of %d bytes", uint8(f), f, f.Bytes())
		}
		if f.Sums() == attn.Float64 || !formats[f].dense { // the others: see blocks_test.go
			continue
		}
		got := make([]float32, len(want))
		if Decode(f, got, stored[f]); got[0] != want[0] || got[1] != want[1] || got[2] != want[2] {
			t.Errorf("%v: %v, want %v", f, got, want)
		}
	}
	if none := Format(Formats); none.Known() || none.Bytes() != 0 || none.Kernels() != "" || none.String() != fmt.Sprintf("Format(%d)", Formats) || Dense(attn.DTypes) != none {
		t.Errorf("%v is a format", none)
	}
	defer func() {
		if recover() == nil {
			t.Error("float64 became float32")
		}
	}()
	Decode(Float64, make([]float32, 1), unsafe.Pointer(new(float64)))
}

func TestNames(t *testing.T) {
	for want, pick := range map[string]func(Format) bool{
		"": func(Format) bool { return false }, "float64": func(f Format) bool { return f == Float64 },
		"float32 or float64": func(f Format) bool { return f.Bytes() > 2 && f.Block() == 1 }, "float32, float16 or bfloat16": func(f Format) bool { return f.Kernels() != "" },
	} {
		if got := Names(pick); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestMatrix(t *testing.T) {
	w := []uint16{0, 1, 2, 3, 4, 5, 6, 7}
	m := Matrix{Format: Float16, Ptr: unsafe.Pointer(&w[0]), Len: 8, Scales: []float32{1, 2, 3, 4}}
	r := m.Rows(1, 2, 2)
	if r.Format != Float16 || r.Len != 4 || *(*uint16)(r.At(1)) != 3 || len(r.Scales) != 2 || r.Scales[0] != 2 {
		t.Errorf("rows 1 and 2 are %+v", r)
	}
	for name, c := range map[string]struct {
		change func(*Matrix)
		want   error
	}{
		"as it should be": {func(*Matrix) {}, nil},
		"unknown":         {func(m *Matrix) { m.Format = Formats }, attn.ErrDType},
		"nowhere":         {func(m *Matrix) { m.Ptr = nil }, attn.ErrShape},
		"less than none":  {func(m *Matrix) { m.Len = -1 }, attn.ErrShape},
		"part of a block": {func(m *Matrix) { m.Format = Q8_0 }, attn.ErrShape},
		"no scales":       {func(m *Matrix) { m.Format, m.Scales = Int8, nil }, attn.ErrShape},
		"crooked block":   {func(m *Matrix) { m.Format, m.Len, m.Ptr = Q4_1, 32, unsafe.Add(m.Ptr, 1) }, nil},
		"crooked":         {func(m *Matrix) { m.Ptr = unsafe.Add(m.Ptr, 1) }, attn.ErrShape},
		"scaled float64":  {func(m *Matrix) { m.Format, m.Len = Float64, 1; m.Ptr = unsafe.Pointer(new(float64)) }, attn.ErrUnsupported},
	} {
		m := m
		c.change(&m)
		if err := m.Check("test", "w"); !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", name, err, c.want)
		}
	}
}
