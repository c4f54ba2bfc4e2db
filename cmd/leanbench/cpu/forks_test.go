package cpu

import (
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// TestForks: forks and copies compute the same, and have all figures.
func TestForks(t *testing.T) {
	b, _ := testBench(t)
	s := forksShape{heads: 4, kvHeads: 2, dim: 16, sequences: 3, prefix: 100, keys: 20, storage: measure.StoreF32}
	if n := s.bytes(); n != 2*160*2*16*4 {
		t.Errorf("%d bytes", n)
	}
	if err := b.forks(s); err != nil {
		t.Fatal(err)
	}
	is := s.String()
	if is != "f32, 3 forks of 100 and 20 each, 4/2 heads x 16" {
		t.Errorf("the case is called %q", is)
	}
	for _, who := range []string{measure.ReadCeiling, "forks", "copies"} {
		if ms := b.report.Find(is, who, measure.StepMillis); ms == nil || !(ms.Value > 0) {
			t.Errorf("%s: %+v", who, ms)
		}
		if f := b.report.Find(is, who, measure.OverCopies); (f != nil) != (who == "forks") {
			t.Errorf("%s: %+v", who, f)
		}
	}
}
