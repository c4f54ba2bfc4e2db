//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package cuda_test

import (
	"bytes"
	"errors"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
)

// someTiles are 64 rows of 128 elements in boxes of 16 rows.
var someTiles = cuda.Tiles{ElementBytes: 2, Dims: [3]uint64{64, 64, 2}, Strides: [2]uint64{256, 128}, Box: [3]uint32{64, 16, 2}}

// The fake driver's map is its arguments.
func TestTensorMap(t *testing.T) {
	lib, dev := openFake(t)
	b, err := dev.NewBuffer(1 << 15)
	if err != nil {
		t.Fatal(err)
	}
	for element, kind := range map[int]uint64{2: 1, 4: 2} {
		tiles := someTiles
		tiles.ElementBytes = element
		m, err := dev.TensorMap(b, 32, tiles)
		if err != nil {
			t.Fatal(err)
		}
		if want := (cuda.TensorMap{b.Address() + 32, kind, 64, 64, 2, 256, 128, 64, 16, 2, 0, 3, 2, 0}); m != want {
			t.Errorf("%d-byte elements: %v, want %v", element, m, want)
		}
	}
	for _, bad := range []struct {
		b      *cuda.Buffer
		offset int64
		tiles  cuda.Tiles
		err    error
	}{
		{b, -1, someTiles, cuda.ErrRange},
		{b, 1<<15 + 1, someTiles, cuda.ErrRange},
		{b, 0, cuda.Tiles{ElementBytes: 8}, cuda.ErrRange},
	} {
		if _, err := dev.TensorMap(bad.b, bad.offset, bad.tiles); !errors.Is(err, bad.err) {
			t.Errorf("%+v at %d: %v", bad.tiles, bad.offset, err)
		}
	}
	var failed *cuda.Error
	if _, err := dev.TensorMap(b, 8, someTiles); !errors.As(err, &failed) || failed.Call != "cuTensorMapEncodeTiled" {
		t.Errorf("at 8: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := dev.TensorMap(b, 0, someTiles); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("of a closed buffer: %v", err)
	}
	nothingLeft(t, lib, dev)
}

func TestHostWrite(t *testing.T) {
	lib, dev := openFake(t)
	h, err := dev.NewHost(8)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Write(3, []byte{1, 2, 3}); err != nil || !bytes.Equal(h.Bytes(), []byte{0, 0, 0, 1, 2, 3, 0, 0}) {
		t.Errorf("%v, %v", h.Bytes(), err)
	}
	for _, at := range []int{-1, 6} {
		if err := h.Write(at, make([]byte, 3)); !errors.Is(err, cuda.ErrRange) {
			t.Errorf("at %d: %v", at, err)
		}
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if err := h.Write(0, nil); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	nothingLeft(t, lib, dev)
}

// A launch looks at buffers that a struct names.
func TestArgsHold(t *testing.T) {
	lib, dev := openFake(t)
	u := newUse(t, dev)
	b, err := dev.NewBuffer(8)
	if err != nil {
		t.Fatal(err)
	}
	u.args.Hold(b)
	if err := u.f.Launch(u.s, cuda.Grid{Overlap: true}, u.args); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if err := u.f.Launch(u.s, cuda.Grid{}, u.args); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	nothingLeft(t, lib, dev)
}
