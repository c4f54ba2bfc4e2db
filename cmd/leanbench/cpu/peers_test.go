package cpu

import (
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// TestMeasurePeer: PyTorch's times become its speed and our ratio to it.
func TestMeasurePeer(t *testing.T) {
	w, err := measure.Start(measuretest.Command(t, "well"))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	b, _ := testBench(t)
	for _, kvHeads := range []int{4, 2} {
		shape := decodeShape{heads: 4, kvHeads: kvHeads, keys: 100, dim: 16, storage: measure.StoreF16}
		if err := b.measurePeer(w, one{table: tableTorch, shape: shape, inCache: true, faster: measure.AtLeast(1e-9)}); err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("shape 4 %d 100 16 f16 1", kvHeads); !strings.Contains(w.Stderr.Text(), want) {
			t.Errorf("the worker was not asked for %q:%s", want, w.Stderr.Text())
		}
		is := shape.String() + ", in cache"
		if f := b.report.Find(is, "PyTorch", measure.Speed); f == nil || !measuretest.Near(f.Value, float64(shape.bytes())/1e-3/1e9) {
			t.Errorf("PyTorch: %+v", f)
		}
		packed := b.report.Find(is, "PyTorch, groups packed by hand", measure.Speed)
		if (packed != nil) != (kvHeads == 2) || packed != nil && !measuretest.Near(packed.Value, float64(shape.bytes())/5e-4/1e9) {
			t.Errorf("PyTorch, packed: %+v", packed)
		}
		f, ours := b.report.Find(is, "lean, Attend", measure.OverTorch), b.report.Find(is, "lean, Attend", measure.Speed)
		// Of two rounds the median is the mean: of our speed, and of our time.
		if f == nil || f.Bar == nil || !f.Bar.Met || f.Value < ours.Value*1e9/float64(shape.bytes())*1e-3*0.999 {
			t.Errorf("%+v, and we have %+v", f, ours)
		}
	}
}

func TestMain(m *testing.M) { measuretest.Main(m) }
