package leanattention

import (
	"errors"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/tensor"
)

// Rows share the tensor's memory, and go with it.
func TestDeviceRows(t *testing.T) {
	gpu, _ := FakeGPU(t)
	x := []float32{0, 1, 2, 3, 4, 5}
	d, err := gpu.Upload(tensor.New(tensor.WithShape(3, 2), tensor.WithBacking(x)))
	noError(t, err)
	rows, err := d.Rows(1, 3)
	noError(t, err)
	last, err := rows.Rows(1, 2)
	noError(t, err)
	noError(t, last.CopyFrom(tensor.New(tensor.WithShape(1, 2), tensor.WithBacking([]float32{7, 8}))))
	first, err := d.Rows(0, 1)
	noError(t, err)
	noError(t, first.CopyFrom(last))
	for i, c := range []struct {
		d    *device.Tensor
		want []float32
	}{{d, []float32{7, 8, 2, 3, 7, 8}}, {rows, []float32{2, 3, 7, 8}}, {last, []float32{7, 8}}} {
		got, err := c.d.Download()
		noError(t, err)
		for j, w := range c.want {
			if v := got.Data().([]float32)[j]; v != w {
				t.Errorf("tensor %d, element %d: %v, want %v", i, j, v, w)
			}
		}
	}
	upper, err := d.Rows(0, 2)
	noError(t, err)
	noError(t, rows.CopyFrom(rows))
	for name, err := range map[string]error{"upwards": rows.CopyFrom(upper), "downwards": upper.CopyFrom(rows)} {
		if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "some rows are in both") {
			t.Errorf("rows that overlap, %s: %v", name, err)
		}
	}
	if err := rows.Free(); !errors.Is(err, ErrUnsupported) {
		t.Errorf("Free of rows: %v", err)
	}
	for _, c := range [][2]int{{-1, 1}, {0, 4}, {2, 2}, {2, 1}} {
		if _, err := d.Rows(c[0], c[1]); !errors.Is(err, ErrShape) {
			t.Errorf("rows %v: %v", c, err)
		}
	}
	noError(t, d.Free())
	if _, err := rows.Download(); !errors.Is(err, ErrClosed) {
		t.Errorf("rows of a freed tensor: %v", err)
	}
}
