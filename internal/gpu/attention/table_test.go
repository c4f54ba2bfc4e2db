//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
	"gorgonia.org/leanattention/kernels"

	"pgregory.net/rapid"
)

// capabilities has those of present GPUs, and one of a future GPU.
var capabilities = []int{80, 86, 89, 90, 100, 120, 130}

// entriesOf returns the kernels of an image: a cubin has their code sections, PTX has their entries.
func entriesOf(image []byte) map[string]bool {
	names := map[string]bool{}
	for _, around := range [][2]string{{"\x00.text.", "\x00"}, {"\n.visible .entry ", "("}} {
		for rest := image; ; {
			_, after, ok := bytes.Cut(rest, []byte(around[0]))
			if !ok {
				break
			}
			name, _, _ := bytes.Cut(after, []byte(around[1]))
			names[string(name)] = true
			rest = after
		}
	}
	return names
}

// Every kernel of the table is in the committed modules, for each GPU of its line. The table has every attention kernel
// of the modules.
func TestTableIsTheModules(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("images are unpacked in one goroutine, and take many times as long")
	}
	named, has := map[string][]string{}, map[*byte]map[string]bool{} // has: by image
	for _, k := range append([]kernel{
		{unit: appendUnit, entries: []string{appendEntry, rotaryEntry}, capability: ampere}, {unit: narrowUnit, entries: []string{narrowEntry}, capability: ampere},
		{unit: latentAnyUnit, entries: []string{latentAppendEntry}, capability: ampere}, {unit: fourUnit, entries: []string{fourEntry}, capability: ampere},
	}, table...) {
		if k.unit == "" { // compiled at run time
			continue
		}
		named[k.unit] = append(named[k.unit], k.entries...)
		for _, capability := range capabilities {
			if !k.capability.have(capability) {
				continue
			}
			image, err := kernels.Image(k.unit, capability)
			if err != nil {
				t.Fatal(err)
			}
			entries := has[&image[0]]
			if entries == nil {
				entries = entriesOf(image)
				has[&image[0]] = entries
			}
			for _, entry := range k.entries {
				if !entries[entry] {
					t.Errorf("unit %s for %d has no %s", k.unit, capability, entry)
				}
				if part := entry[:len(entry)-1]; entries[part] {
					t.Errorf("a part of a name, %s, is taken for a kernel", part)
				}
			}
		}
	}
	for unit, entries := range named {
		text, err := os.ReadFile("../../../kernels/modules/" + unit + ".json")
		if err != nil {
			t.Fatal(err)
		}
		var manifest struct{ Entries map[string]string }
		if err := json.Unmarshal(text, &manifest); err != nil || len(manifest.Entries) == 0 {
			t.Fatalf("unit %s has %d entries: %v", unit, len(manifest.Entries), err)
		}
		for entry := range manifest.Entries {
			if !slices.Contains(entries, entry) {
				t.Errorf("unit %s has %s, of which the table knows nothing", unit, entry)
			}
		}
	}
}

// Attention modules are few and small: kernels choose at run time and are not copied.
func TestModulesStaySmall(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("images are unpacked in one goroutine, and take many times as long")
	}
	units := map[string]bool{prefixUnit: true}
	for _, k := range table {
		if k.unit != "" { // compiled at run time
			units[k.unit] = true
		}
	}
	bytes := 0
	for unit := range units {
		image, err := kernels.Image(unit, 90)
		if err != nil {
			t.Fatal(err)
		}
		bytes += len(image)
	}
	// 60% of the size when each Variant had its own units, and the kernels for keys that hold the values, for 8 bits, for both, for halves, for prompts with values of 128 and keys of 192, and for 8 bits with masks, for 4 bits, for measured weights, for rows as they lie, for heads of any width, and for 4 bits with masks and of other widths
	if most := 9_930_000 + 1_370_000 + 650_000 + 200_000 + 60_000 + 220_000 + 460_000 + 360_000 + 970_000 + 3_830_000 + 600_000; len(units) > 19 || bytes > most {
		t.Errorf("%d units of %d bytes for 9.0; 19 of %d is the most", len(units), bytes, most)
	}
}

// No line follows a line that does all that it does.
func TestTableHasNoDeadLine(t *testing.T) {
	for _, f := range enginetest.Fakes {
		all := kernelsOf(f.Capability)
		for i := range all {
			k := &all[i]
			found := false
			dims := k.dims
			if k.anyWidth {
				dims = []int{128}
			}
			apart := k.unit == anyUnit
			if apart {
				dims = []int{72}
			}
			for _, dim := range dims {
				g := paged(2*max(k.rows, 1), 2, dim)
				g.Pages, g.Unfused, g.Invariant = g.Pages.As(k.kv), k.family == &unfusedFamily, k.needs&attn.BatchInvariance != 0
				g.Measures = k.measures
				if k.needs&attn.Varied != 0 {
					g.Variant = oneVariant
				}
				if k.value > 0 && !k.isDirect() {
					g.ValueDim, g.Pages = k.value, latentPages(k.kv, dim, k.value)
					switch {
					case k.halves && k.kv == attn.E4M3:
						g.QueryType, g.Pages = attn.BFloat16, groupedPages(dim, k.value)
					case k.halves:
						g.QueryType = k.kv
					}
				}
				if k.anyWidth && !apart {
					g.Pages = latentPages(k.kv, dim, dim)
					if k.kv == attn.E4M3 {
						g.Pages.Planes[0].Scales, g.Pages.Planes[0].Group = attn.ScalesByGroup, latentGroup
					}
				}
				switch {
				case k.kv == attn.Q4:
					g.Pages.Planes[0].Mixed = true
				case k.family == &narrowFamily:
					g.Pages.Planes[0].Scales, g.Pages.Planes[1].Scales = attn.ScalesByToken, attn.ScalesByToken
				}
				if can := k.features; can&maskFeatures != 0 && !g.Invariant {
					g.Window = 5
					if can&changeFeatures != 0 {
						g.Cap = 30
					}
				}
				if k.isDirect() {
					g.Pages = attn.Separate(k.kv, dim, k.value, attn.PageStrides{}, attn.PageStrides{})
					spread := spreadsOf(&g)
					g = spread.problem(g)
				}
				pages := 0
				if k.paged {
					pages = 1
				}
				w := want{problem: &g, features: g.Features(), rows: max(k.rows, 1), pages: pages, long: k.row, same: k.same(), rounds: k.same() && !k.exact, direct: k.isDirect()}
				found = found || find(all, &w) == k
				if k.spreads && k.needs == 0 && !found { // for narrower heads
					narrow := paged(2*max(k.rows, 1), 2, dim-8)
					narrow.Pages = narrow.Pages.As(k.kv)
					spread := spreadsOf(&narrow)
					g = spread.problem(narrow)
					w.features = g.Features()
					found = find(all, &w) == k
				}
			}
			if !found {
				t.Errorf("%s: %v is found for nothing", f.Name, k.entries)
			}
		}
	}
}

var oneVariant, _ = variant.New(variant.Source{Score: "score/2"})

// randomProblem draws a problem with any features.
func randomProblem(t *rapid.T) (g attn.Problem) {
	kvHeads := rapid.IntRange(1, 3).Draw(t, "KV heads")
	dim := rapid.SampledFrom([]int{64, 80, 96, 128, 256, 72, 4}).Draw(t, "dim")
	g = paged(kvHeads*rapid.IntRange(1, 20).Draw(t, "group"), kvHeads, dim)
	g.Pages = g.Pages.As(rapid.SampledFrom([]attn.DType{attn.Float16, attn.BFloat16, attn.Float32, attn.Float64}).Draw(t, "kv"))
	g.Scale = rapid.SampledFrom([]float64{0.125, 0, -1}).Draw(t, "scale")
	g.Causal, g.Unfused = rapid.Bool().Draw(t, "causal"), rapid.Bool().Draw(t, "unfused")
	seldom := func(what string, change func()) {
		if rapid.IntRange(0, 9).Draw(t, what) == 0 {
			change()
		}
	}
	seldom("window", func() { g.Window = 5 })
	seldom("cap", func() { g.Cap = 30 })
	seldom("slopes", func() { g.Slopes = attn.NewSlopes(make([]float64, g.Heads)) })
	seldom("bias", func() { g.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: 9} })
	seldom("sinks", func() { g.Sinks = true })
	seldom("variant", func() { g.Variant = oneVariant })
	seldom("value dim", func() { g.ValueDim = 2 * g.Dim })
	seldom("policy", func() { g.Policy = lean.Policy{Kind: lean.PerHead} })
	seldom("tiles", func() { g.TileTokens = 64 })
	seldom("workers", func() { g.Workers = 3 })
	seldom("batch invariance", func() { g.Invariant = true })
	seldom("query strides", func() { g.Query.Row += 2 })
	seldom("output strides", func() { g.Out.Head += 4 })
	seldom("rows of keys", func() { g.Pages.Planes[0].At.Row++ })
	seldom("values", func() { g.Pages.Planes[1].At.Page += g.Dim })
	return g
}

// Problems that Supports accepts have a kernel for any lengths. Problems that it refuses have none. Build agrees.
func TestSupportsIsTheTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := randomProblem(t)
		capability := rapid.SampledFrom(capabilities).Draw(t, "capability")
		e := &Engine{info: cuda.Info{Capability: capability, SharedPerBlockMost: rapid.SampledFrom([]int{1000, 60000, 101376, 232448}).Draw(t, "shared")}, kernels: kernelsOf(capability)}
		err := e.Supports(&g)
		some := HasKernel(&g)
		asked, spread := g, spreadsIn(e.kernels, &g)
		if err == nil && some != nil && !spread.on() {
			t.Fatalf("%+v: a GPU has a kernel, and none has one: %v", g, some)
		}
		if err != nil && !errors.Is(err, attn.ErrUnsupported) && !errors.Is(err, attn.ErrDType) && !errors.Is(err, attn.ErrShape) {
			t.Fatalf("%+v: %v", g, err)
		}
		g = spread.problem(g)
		group := g.Group()
		w := want{
			problem: &g, features: g.Features(), rows: min(rapid.IntRange(1, 16).Draw(t, "queries")*group, BlockRows),
			pages: rapid.SampledFrom([]int{0, 1, 4, 16, 32}).Draw(t, "pages"), same: rapid.Bool().Draw(t, "same"),
		}
		w.rounds = w.same && rapid.Bool().Draw(t, "rounds")
		k := find(e.kernels, &w)
		if err == nil && k == nil {
			t.Fatalf("%+v: supported, and there is no kernel for %d rows, %d pages", g, w.rows, w.pages)
		}
		if k == nil {
			return
		}
		if g.Features()&^k.features != 0 || k.kv != g.Pages.Planes[0].DType || !k.anyWidth && !slices.Contains(k.dims, g.Dim) || k.anyWidth && !headWidths(&g) || k.rows > w.rows || k.paged && w.pages == 0 ||
			g.Unfused != (k.family == &unfusedFamily) || k.same() && !w.same || w.rounds && k.exact || !k.capability.have(capability) {
			t.Fatalf("%v can't do %+v, %+v", k.entries, g, w)
		}
		// Only the layout of keys, and shared memory, are not in the table.
		if err != nil && supportsKeys("test", &asked) == nil && e.find(&want{problem: &g, features: w.features, rows: group}) != nil {
			t.Fatalf("%+v has a kernel, %v, and is refused: %v", g, k.entries, err)
		}
	})
}

// A problem is refused if each of its features has a kernel and no kernel has all.
func TestRefusalOfTheWhole(t *testing.T) {
	lines := []kernel{{features: attn.Causal, kv: attn.Float16, dims: []int{64}}, {features: attn.Window, kv: attn.Float16, dims: []int{64}}}
	g := paged(4, 2, 64)
	g.Causal, g.Window = true, 7
	wantError(t, "both", supports("test", &g, lines), attn.ErrUnsupported, "none for all")
	g.Causal = false
	noError(t, supports("test", &g, lines))
	g.Cap = 3
	wantError(t, "neither", supports("test", &g, lines), attn.ErrUnsupported, "a soft cap of 3")
}
