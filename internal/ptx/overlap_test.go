package ptx

import (
	"strings"
	"testing"
)

// A launch that may begin before the one before it has ended: what that one writes is
// behind griddepcontrol.wait, whichever way it is read, and so is the writing of what that one reads.
func TestOverlap(t *testing.T) {
	const store = "add.s64 %out, %g1, %i4;\nst.global.u32 [%out], 7;\n"
	first := program(2, "griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\n"+store)
	reads := program(2, "griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\nadd.s64 %rd1, %g0, %i4;\nld.global.u32 %r1, [%rd1];\n")
	never := program(2, "griddepcontrol.wait;\n"+store)
	const wait, next = "griddepcontrol.wait;\n", "griddepcontrol.launch_dependents;\n"
	read := func(what string) string { return "add.s64 %rd1, " + what + ", %i4;\nld.global.u32 %r1, [%rd1];\n" }
	const generic = "add.s64 %rd1, %g1, %i4;\nld.u32 %r1, [%rd1];\n"
	const copied = "mul.lo.s32 %r2, %t, 16;\nmov.u32 %r3, memory;\nadd.s32 %r3, %r3, %r2;\nmul.wide.u32 %rd1, %t, 4;\nand.b64 %rd1, %rd1, -16;\nadd.s64 %rd1, %g1, %rd1;\ncp.async.cg.shared.global [%r3], [%rd1], 16;\ncp.async.wait_all;\n"
	for name, c := range map[string]struct {
		first, then, says string
	}{
		"in order":             {first, wait + next + read("%g1") + result("%r1"), ""},
		"reads else before":    {first, read("%g2") + wait + result("%r1"), ""},
		"reads before":         {first, read("%g1") + wait + result("%r1"), "which a launch before writes, are read before"},
		"generic":              {first, generic + wait + result("%r1"), "which a launch before writes, are read before"},
		"copies before":        {first, copied + wait, "which a launch before writes, are read before"},
		"writes before":        {first, store + wait, "written before griddepcontrol.wait"},
		"writes what is read":  {reads, result("%t") + wait, "written before griddepcontrol.wait"},
		"writes else before":   {first, result("%t") + wait, ""},
		"adds before":          {first, "atom.global.add.u32 %r1, [%g1], 1;\n" + wait, "written before griddepcontrol.wait"},
		"never waits":          {first, "", "without having waited"},
		"one thread waits":     {first, "setp.eq.u32 %p1, %t, 0;\n@%p1 griddepcontrol.wait;\nbar.sync 0;\n" + read("%g1") + result("%r1"), ""},
		"the first let nobody": {never, read("%g1") + result("%r1"), ""},
	} {
		a, b, other := memory[uint32](64), memory[uint32](64), memory[uint32](64)
		var trace Trace
		if err := launch(compile(t, c.first), Launch{Grid: 2, Block: 32, Trace: &trace}, rangeOf(a), rangeOf(b)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		err := launch(compile(t, program(3, c.then)), Launch{Grid: 2, Block: 32, Shared: 1024, Before: &trace}, rangeOf(a), rangeOf(b), rangeOf(other))
		switch {
		case c.says == "" && err != nil, c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}

// A launch that lets the next one start before it has waited may run beside that one and
// the one before; and so may those behind it.
func TestOverlapOfMany(t *testing.T) {
	const wait, next = "griddepcontrol.wait;\n", "griddepcontrol.launch_dependents;\n"
	const store = "add.s64 %out, %g1, %i4;\nst.global.u32 [%out], 7;\n"
	const read = "add.s64 %rd1, %g1, %i4;\nld.global.u32 %r1, [%rd1];\n"
	for name, c := range map[string]struct {
		between []string
		last    string
		says    string
	}{
		"after its wait":        {[]string{wait + next}, read + wait, ""},
		"before its wait":       {[]string{next + wait}, read + wait, "which a launch before writes, are read before"},
		"but for one block":     {[]string{"setp.eq.u32 %p1, %b, 0;\n@%p1 " + wait + next + wait}, read + wait, ""},
		"one block lets nobody": {[]string{"setp.eq.u32 %p1, %b, 0;\n@!%p1 " + next + wait}, read + wait, ""},
		"two of them":           {[]string{next + wait, next + wait}, read + wait, "which a launch before writes, are read before"},
		"one has waited":        {[]string{next + wait, wait + next, next + wait}, read + wait, ""},
		"one lets nobody":       {[]string{next + wait, wait, next + wait}, read + wait, ""},
		"reads afterwards":      {[]string{next + wait, next + wait}, wait + read, ""},
	} {
		a := memory[uint32](64)
		before := new(Trace)
		run := func(text string) error {
			after := new(Trace)
			err := launch(compile(t, program(2, text)), Launch{Grid: 2, Block: 32, Before: before, Trace: after}, rangeOf(memory[uint32](64)), rangeOf(a))
			before = after
			return err
		}
		err := run(next + store)
		for _, text := range c.between {
			if err == nil {
				err = run(text)
			}
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := run(c.last); (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}

// Of a trace's words those are written that have been.
func TestTrace(t *testing.T) {
	var trace Trace
	trace.writes.add(1000, 12)
	for at, want := range map[uint64]bool{992: false, 996: false, 1000: true, 1004: true, 1008: true, 1012: false} {
		if got := trace.writes.has(at, 4); got != want {
			t.Errorf("%d: %v", at, got)
		}
	}
	if !trace.writes.has(1010, 2) || !trace.writes.has(990, 12) || trace.writes.has(980, 20) {
		t.Error("ranges that begin or end within a word")
	}
}
