package attention

import (
	"errors"
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/lean"
)

// good returns a small plan's input, and operands that fit exactly.
func good() (attn.Problem, []attn.Sequence, Operands[float32]) {
	g := attn.Problem{
		Heads: 4, KVHeads: 2, Dim: 3, ValueDim: 2,
		Query: attn.Strides{Row: 12, Head: 3}, Out: attn.Strides{Row: 8, Head: 2}, LSE: attn.Strides{Row: 4, Head: 1},
		Pages: attn.Separate(attn.Float32, 3, 2, attn.PageStrides{Page: 2 * 4 * 3, Head: 4 * 3, Row: 3}, attn.PageStrides{Page: 2 * 4 * 2, Head: 4 * 2, Row: 2}), PageTokens: 4,
		Scale: 1, Mask: attn.Mask{Causal: true}, TileTokens: 4, Workers: 2,
	}
	seqs := []attn.Sequence{
		{Row: 0, Queries: 1, Keys: 9, Pages: []int32{2, 0, 1}},
		{Row: 1, Queries: 2, Keys: 4, Pages: []int32{3}},
	}
	k, v := make([]float32, 4*g.Pages.Planes[0].At.Page), make([]float32, 4*g.Pages.Planes[1].At.Page)
	return g, seqs, Operands[float32]{
		Q: make([]float32, 3*12), Out: make([]float32, 3*8), LSE: make([]float32, 3*4),
		Pages: attn.InPlanes(cpu.Buffer{DType: attn.Float32, Ptr: unsafe.Pointer(&k[0]), Len: len(k)}, cpu.Buffer{DType: attn.Float32, Ptr: unsafe.Pointer(&v[0]), Len: len(v)}),
	}
}

func TestBuildErrors(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*attn.Problem, []attn.Sequence)
		want   error
	}{
		"as it should be":                {func(g *attn.Problem, s []attn.Sequence) {}, nil},
		"no heads":                       {func(g *attn.Problem, s []attn.Sequence) { g.Heads = 0 }, attn.ErrShape},
		"no KV heads":                    {func(g *attn.Problem, s []attn.Sequence) { g.KVHeads = 0 }, attn.ErrShape},
		"heads not a multiple":           {func(g *attn.Problem, s []attn.Sequence) { g.KVHeads = 3 }, attn.ErrShape},
		"fewer heads than KV heads":      {func(g *attn.Problem, s []attn.Sequence) { g.KVHeads = 8 }, attn.ErrShape},
		"no dim":                         {func(g *attn.Problem, s []attn.Sequence) { g.Dim = 0 }, attn.ErrShape},
		"negative value dim":             {func(g *attn.Problem, s []attn.Sequence) { g.ValueDim = -1 }, attn.ErrShape},
		"no page size":                   {func(g *attn.Problem, s []attn.Sequence) { g.PageTokens = 0 }, attn.ErrShape},
		"negative LeanTile":              {func(g *attn.Problem, s []attn.Sequence) { g.TileTokens = -1 }, attn.ErrShape},
		"negative workers":               {func(g *attn.Problem, s []attn.Sequence) { g.Workers = -1 }, attn.ErrShape},
		"scale not a number":             {func(g *attn.Problem, s []attn.Sequence) { g.Scale = math.NaN() }, attn.ErrShape},
		"infinite scale":                 {func(g *attn.Problem, s []attn.Sequence) { g.Scale = math.Inf(-1) }, attn.ErrShape},
		"negative window":                {func(g *attn.Problem, s []attn.Sequence) { g.Window = -1 }, attn.ErrShape},
		"negative soft cap":              {func(g *attn.Problem, s []attn.Sequence) { g.Cap = -1 }, attn.ErrShape},
		"infinite soft cap":              {func(g *attn.Problem, s []attn.Sequence) { g.Cap = math.Inf(1) }, attn.ErrShape},
		"soft cap not a number":          {func(g *attn.Problem, s []attn.Sequence) { g.Cap = math.NaN() }, attn.ErrShape},
		"too few slopes":                 {func(g *attn.Problem, s []attn.Sequence) { g.Slopes = attn.NewSlopes(make([]float64, 3)) }, attn.ErrShape},
		"slope not a number":             {func(g *attn.Problem, s []attn.Sequence) { g.Slopes = attn.NewSlopes([]float64{1, 2, 3, math.NaN()}) }, attn.ErrShape},
		"huge window":                    {func(g *attn.Problem, s []attn.Sequence) { g.Window = math.MaxInt }, nil},
		"unknown schedule":               {func(g *attn.Problem, s []attn.Sequence) { g.Policy.Kind = 3 }, attn.ErrShape},
		"fixed split into nothing":       {func(g *attn.Problem, s []attn.Sequence) { g.Policy.Kind = lean.FixedSplit }, attn.ErrShape},
		"negative query stride":          {func(g *attn.Problem, s []attn.Sequence) { g.Query.Row = -1 }, attn.ErrShape},
		"negative output stride":         {func(g *attn.Problem, s []attn.Sequence) { g.Out.Head = -1 }, attn.ErrShape},
		"negative log-sum-exp stride":    {func(g *attn.Problem, s []attn.Sequence) { g.LSE.Head = -1 }, attn.ErrShape},
		"negative key stride":            {func(g *attn.Problem, s []attn.Sequence) { g.Pages.Planes[0].At.Page = -1 }, attn.ErrShape},
		"negative value stride":          {func(g *attn.Problem, s []attn.Sequence) { g.Pages.Planes[1].At.Row = -1 }, attn.ErrShape},
		"negative row":                   {func(g *attn.Problem, s []attn.Sequence) { s[1].Row = -1 }, attn.ErrShape},
		"negative queries":               {func(g *attn.Problem, s []attn.Sequence) { s[1].Queries = -1 }, attn.ErrShape},
		"negative keys":                  {func(g *attn.Problem, s []attn.Sequence) { s[1].Keys = -1 }, attn.ErrShape},
		"rows that overflow":             {func(g *attn.Problem, s []attn.Sequence) { s[1].Row = math.MaxInt }, attn.ErrShape},
		"page table too short":           {func(g *attn.Problem, s []attn.Sequence) { s[0].Keys = 13 }, attn.ErrPage},
		"no page table":                  {func(g *attn.Problem, s []attn.Sequence) { s[0].Pages = nil }, attn.ErrPage},
		"negative page":                  {func(g *attn.Problem, s []attn.Sequence) { s[0].Pages[2] = -1 }, attn.ErrPage},
		"nonsense behind the last page":  {func(g *attn.Problem, s []attn.Sequence) { s[1].Keys = 0; s[1].Pages[0] = -1 }, nil},
		"no queries and so no pages":     {func(g *attn.Problem, s []attn.Sequence) { s[0] = attn.Sequence{Keys: 1000} }, nil},
		"huge LeanTiles":                 {func(g *attn.Problem, s []attn.Sequence) { g.TileTokens = math.MaxInt }, nil},
		"as many workers as one can ask": {func(g *attn.Problem, s []attn.Sequence) { g.Workers = math.MaxInt }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			g, seqs, o := good()
			var p Plan
			if err := p.Build(g, seqs[1:]); err != nil {
				t.Fatal(err)
			}
			tiles := p.Tiles()
			c.change(&g, seqs)
			err := p.Build(g, seqs)
			if !errors.Is(err, c.want) {
				t.Fatalf("error %v, want %v", err, c.want)
			}
			if err != nil && p.Tiles() != tiles {
				t.Error("a plan that was not built has changed")
			}
			if err := Run(cpu.Default(), &p, &o); err != nil {
				t.Error("what was built does not run: ", err)
			}
		})
	}
}

func TestRunErrors(t *testing.T) {
	type geometry = attn.Problem
	for name, c := range map[string]struct {
		change func(*geometry, *Operands[float32])
		want   error
	}{
		"as it should be":          {func(g *geometry, o *Operands[float32]) {}, nil},
		"no log-sum-exp":           {func(g *geometry, o *Operands[float32]) { o.LSE = nil }, nil},
		"queries too short":        {func(g *geometry, o *Operands[float32]) { o.Q = o.Q[1:] }, attn.ErrShape},
		"output too short":         {func(g *geometry, o *Operands[float32]) { o.Out = o.Out[1:] }, attn.ErrShape},
		"log-sum-exp too short":    {func(g *geometry, o *Operands[float32]) { o.LSE = o.LSE[1:] }, attn.ErrShape},
		"no queries":               {func(g *geometry, o *Operands[float32]) { o.Q = nil }, attn.ErrShape},
		"keys too short":           {func(g *geometry, o *Operands[float32]) { o.Pages[0].Data.Len-- }, attn.ErrPage},
		"values too short":         {func(g *geometry, o *Operands[float32]) { o.Pages[1].Data.Len-- }, attn.ErrPage},
		"no keys":                  {func(g *geometry, o *Operands[float32]) { o.Pages[0].Data = cpu.Buffer{} }, attn.ErrPage},
		"nil keys":                 {func(g *geometry, o *Operands[float32]) { o.Pages[0].Data.Ptr = nil }, attn.ErrShape},
		"sinks":                    {func(g *geometry, o *Operands[float32]) { g.Sinks, o.Sinks = true, make([]float32, 4) }, nil},
		"no sinks":                 {func(g *geometry, o *Operands[float32]) { g.Sinks = true }, attn.ErrShape},
		"too few sinks":            {func(g *geometry, o *Operands[float32]) { g.Sinks, o.Sinks = true, make([]float32, 3) }, attn.ErrShape},
		"unexpected sinks":         {func(g *geometry, o *Operands[float32]) { o.Sinks = make([]float32, 4) }, attn.ErrShape},
		"unknown dtype":            {func(g *geometry, o *Operands[float32]) { o.Pages[1].Data.DType = 7 }, attn.ErrDType},
		"keys and values differ":   {func(g *geometry, o *Operands[float32]) { o.Pages[1].Data.DType = attn.Float16 }, attn.ErrDType},
		"unaligned values":         {func(g *geometry, o *Operands[float32]) { o.Pages[1].Data.Ptr = unsafe.Add(o.Pages[1].Data.Ptr, 1) }, attn.ErrShape},
		"strides that overflow":    {func(g *geometry, o *Operands[float32]) { g.Pages.Planes[0].At.Page = math.MaxInt }, attn.ErrPage},
		"row strides that do":      {func(g *geometry, o *Operands[float32]) { g.Out.Row = math.MaxInt }, attn.ErrShape},
		"head strides beyond":      {func(g *geometry, o *Operands[float32]) { g.Pages.Planes[1].At.Head = 1000 }, attn.ErrPage},
		"a query stride of 0":      {func(g *geometry, o *Operands[float32]) { g.Query = attn.Strides{} }, nil},
		"a stride of 0 with pages": {func(g *geometry, o *Operands[float32]) { g.Pages.Planes[0].At = attn.PageStrides{} }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			g, seqs, o := good()
			for i := range o.Out {
				o.Out[i] = float32(cputest.Untouched)
			}
			c.change(&g, &o)
			var p Plan
			if err := p.Build(g, seqs); err != nil {
				t.Fatal(err)
			}
			err := Run(cpu.Default(), &p, &o)
			if !errors.Is(err, c.want) {
				t.Fatalf("error %v, want %v", err, c.want)
			}
			for i, x := range o.Out {
				if cputest.IsUntouched(x) != (err != nil) {
					t.Fatalf("error %v, and out[%d] is %v", err, i, x)
				}
			}
		})
	}
}

// The zero Plan, and a plan without rows, need no operands.
func TestRunNothing(t *testing.T) {
	var p Plan
	if err := Run(cpu.Default(), &p, &Operands[float64]{}); err != nil {
		t.Error(err)
	}
	g, _, _ := good()
	if err := p.Build(g, nil); err != nil {
		t.Fatal(err)
	}
	if err := Run(cpu.Default(), &p, &Operands[float32]{}); err != nil {
		t.Error(err)
	}
	// Rows without visible keys need no keys.
	if err := p.Build(g, []attn.Sequence{{Queries: 1}}); err != nil {
		t.Fatal(err)
	}
	out := []float32{1, 1, 1, 1, 1, 1, 1, 1}
	if err := Run(cpu.Default(), &p, &Operands[float32]{Q: make([]float32, 12), Out: out}); err != nil {
		t.Fatal(err)
	}
	for i, x := range out {
		if x != 0 {
			t.Errorf("out[%d] = %v", i, x)
		}
	}
}
