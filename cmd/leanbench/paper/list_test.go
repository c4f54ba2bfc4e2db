package paper

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// TestPanels: names are unique, and each panel has something quick on each kind of device that it is for.
func TestPanels(t *testing.T) {
	seen := make(map[string]bool)
	for _, p := range panels() {
		if seen[p.id] || seen[p.table] || !strings.HasPrefix(p.table, "Figure") || p.what == "" {
			t.Errorf("panel %q, table %q, %q", p.id, p.table, p.what)
		}
		seen[p.id], seen[p.table] = true, true
		for device, points := range map[string][]point{"gpu": p.gpu, "cpu": p.cpu} {
			labels := make(map[string]bool)
			quick := 0
			for _, x := range points {
				if labels[x.label] {
					t.Errorf("%s, %s: %q is there twice", p.id, device, x.label)
				}
				labels[x.label] = true
				if x.quick {
					quick++
				}
				if x.heads < 1 || x.heads%x.kvHeads != 0 || slices.Min(x.lengths) < 1 {
					t.Errorf("%s: %+v", p.id, x)
				}
				most := int64(40 << 30) // bytes
				if device == "cpu" {
					most = 2 << 30
				}
				if size := x.elements() * map[string]int64{"gpu": 2, "cpu": 4}[device]; size > most {
					t.Errorf("%s, %s: %s takes %d bytes", p.id, device, x.label, size)
				}
			}
			if len(points) > 0 && quick == 0 && p.kind != whole {
				t.Errorf("%s, %s: nothing is quick", p.id, device)
			}
		}
	}
}

func TestChosen(t *testing.T) {
	for args, want := range map[string]string{
		"":         strings.Join(ids(panels()), " "),
		"7":        "7a 7b 7c",
		"8b 3 8":   "8b 3 8a 8c",
		"10":       "10 10suites",
		"10suites": "10suites",
		"peaks":    "peaks",
	} {
		got, err := chosen(strings.Fields(args))
		if err != nil || strings.Join(ids(got), " ") != want {
			t.Errorf("%q: %v (%v), want %s", args, ids(got), err, want)
		}
	}
	for _, name := range []string{"1", "7d", "seven", ""} {
		if _, err := chosen([]string{name}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("figure %q is none of 3, 7a, ", name)) {
			t.Errorf("%q: error %v", name, err)
		}
	}
}

// TestRagged: averages are the share of the longest that the name says.
func TestRagged(t *testing.T) {
	for _, x := range ragged(32, 64, 1<<16, 4, 16) {
		var sequences, percent, most int
		if _, err := fmt.Sscanf(x.label, "%d sequences, %d%% of %d,", &sequences, &percent, &most); err != nil {
			t.Fatal(err)
		}
		sum := 0
		for _, n := range x.lengths {
			sum += n
		}
		share := 100 * float64(sum) / float64(len(x.lengths)*slices.Max(x.lengths))
		if len(x.lengths) != sequences || slices.Max(x.lengths) != most || share < float64(percent)-0.1 || share > float64(percent)+0.1 {
			t.Errorf("%s: %v, %.2f%%", x.label, x.lengths, share)
		}
	}
	if n := len(ragged(32, 64, 1<<16, 4)); n != 4 {
		t.Errorf("%d batches of 4 sequences: an average of 20%% can't be", n)
	}
}

// TestSplits: what FlashAttention's heuristic gives, worked out by hand.
func TestSplits(t *testing.T) {
	for _, c := range []struct{ outputs, multiprocessors, keys, dim, want int }{
		{128, 108, 1 << 18, 64, 1}, // 4 sequences of 32 heads on an A100: the paper says that there is no split
		{87, 108, 1 << 18, 64, 1},  // 80% busy
		{56, 108, 1 << 18, 64, 5},  // 280 blocks in 3 waves: 86%, where 27 splits are 14 whole waves, and three keep 78% busy
		{54, 108, 1 << 18, 64, 2},
		{32, 132, 1 << 16, 128, 4},
		{1, 108, 1024, 64, 4}, // four LeanTiles are not more splits
		{1, 2, 1 << 14, 64, 2},
		{1, 108, 1, 64, 1},
	} {
		if got := splits(c.outputs, c.multiprocessors, c.keys, c.dim); got != c.want {
			t.Errorf("%+v: %d splits", c, got)
		}
	}
}
