package attn

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

// latent is keys of 512 numbers with a scale for each 128, and 64 more without: a token's value is the first 512 of its key.
func latent() Format {
	return Format{
		Planes:    [MostPlanes]Plane{{DType: Float16, Dim: 512, Scales: ScalesByGroup, Group: 128}, {DType: BFloat16, Dim: 64}},
		KeyPlanes: 2, Value: Columns{Plane: 0, Dim: 512},
	}
}

func TestFormatCheck(t *testing.T) {
	plain := Separate(Float32, 8, 4, PageStrides{}, PageStrides{})
	for _, good := range []Format{plain, latent(), plain.As(BFloat16), latent().Packed(3, 16), plain.Packed(2, 5).OfHeads(1, 2)} {
		if err := good.Check("op"); err != nil {
			t.Errorf("%+v: %v", good, err)
		}
	}
	for want, change := range map[string]func(f *Format){
		"plane 0 has no elements":                  func(f *Format) { f.Planes[0].Dim = 0 },
		"plane 1 has rows of -1 elements":          func(f *Format) { f.Planes[1].Dim = -1 },
		"plane 3 has no elements":                  func(f *Format) { f.Planes[3].DType = Float16 },
		"plane 3 is behind one without elements":   func(f *Format) { f.Planes[3] = f.Planes[1] },
		"3 planes; keys and values use 2":          func(f *Format) { f.Planes[2] = f.Planes[1] },
		"keys and values of DType(9)":              func(f *Format) { f.Planes[1].DType = 9 },
		"plane 1 has Scales(7)":                    func(f *Format) { f.Planes[1].Scales = 7 },
		"groups of 0 of 64 columns":                func(f *Format) { f.Planes[1].Scales = ScalesByGroup },
		"groups of 65 of 64 columns":               func(f *Format) { f.Planes[1].Scales, f.Planes[1].Group = ScalesByGroup, 65 },
		"no scales, groups of 2 of 64 columns":     func(f *Format) { f.Planes[1].Group = 2 },
		"key strides":                              func(f *Format) { f.Planes[1].At.Row = -1 },
		"keys of 0 planes, of 2 in all":            func(f *Format) { f.KeyPlanes = 0 },
		"keys of 3 planes, of 2 in all":            func(f *Format) { f.KeyPlanes = 3 },
		"values in plane 2, of 2":                  func(f *Format) { f.Value.Plane = 2 },
		"values in plane -1":                       func(f *Format) { f.Value.Plane = -1 },
		"values of 0 elements, of a plane of 512":  func(f *Format) { f.Value.Dim = 0 },
		"values of 65 elements, of a plane of 64":  func(f *Format) { f.Value = Columns{1, 65} },
		"of 63 elements, and a plane of 64 that n": func(f *Format) { f.KeyPlanes, f.Value = 1, Columns{1, 63} },
	} {
		f := latent()
		change(&f)
		err := f.Check("op")
		if !errors.Is(err, ErrShape) && !errors.Is(err, ErrDType) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestFormatSlabs(t *testing.T) {
	f := latent()
	want := []Slab{{Plane: 0, DType: Float16, Row: 512}, {Plane: 0, Scales: true, DType: Float32, Row: 4}, {Plane: 1, DType: BFloat16, Row: 64}}
	if got := slices.Collect(f.Slabs); !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if n := f.TokenBytes(); n != 2*512+4*4+2*64 {
		t.Errorf("%d bytes of a token", n)
	}
	if n := f.KeyDim(); n != 576 {
		t.Errorf("keys of %d elements", n)
	}
	f.Planes[0].Scales, f.Planes[0].Group = ScalesByPage, 0
	if got := slices.Collect(f.Slabs)[1]; got.Row != 0 || got.PageBytes(3, 16) != 12 {
		t.Errorf("scales of pages: %+v, %d bytes a page", got, got.PageBytes(3, 16))
	}
	f.Planes[0].Scales = ScalesByHead
	if got := slices.Collect(f.Slabs); len(got) != 2 {
		t.Errorf("scales of heads are in pages: %+v", got)
	}
	if n := (Slab{DType: Float32, Row: math.MaxInt / 2}).PageBytes(2, 2); n != math.MaxInt {
		t.Errorf("%d bytes of more than an address has", n)
	}
}

// TestFormatScales: each scale belongs to one part of one row, or to as many rows as its kind says, and the last one ends the list.
func TestFormatScales(t *testing.T) {
	const pages, heads, tokens = 3, 2, 4
	for kind, shared := range map[Scales]int{ScalesByHead: pages * tokens, ScalesByPage: tokens, ScalesByToken: 1, ScalesByGroup: 1} {
		p := Plane{DType: Float16, Dim: 5, Scales: kind}
		each := 1
		if kind == ScalesByGroup {
			p.Group, each = 2, 3
		}
		used := map[int]int{}
		for page := range pages {
			for head := range heads {
				for slot := range tokens {
					for i := range each {
						used[p.ScaleOf(page, head, slot, heads, tokens)+i]++
					}
				}
			}
		}
		n := p.ScaleLen(pages, heads, tokens)
		if len(used) != n {
			t.Errorf("%v: %d scales are used, of %d", kind, len(used), n)
		}
		for i, rows := range used {
			if i >= n || rows != shared {
				t.Errorf("%v: scale %d of %d is that of %d rows, want %d", kind, i, n, rows, shared)
			}
		}
	}
	if n := (&Plane{Dim: 5}).ScaleLen(pages, heads, tokens); n != 0 {
		t.Errorf("%d scales of a plane without", n)
	}
}
