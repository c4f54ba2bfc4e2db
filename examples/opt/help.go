package main

import (
	"flag"
	"fmt"
	"io"
)

const usage = `opt continues texts with an OPT model:

  opt -prompt "Once upon a time" [-prompt ...] [flags]   continues texts
  opt -i [flags]                                         continues lines, in a session
  opt -perplexity FILE [flags]                           tells how likely a text is

Where RANK and WORLD_SIZE are set, as torchrun sets them, it is one of several
processes that have the model together, each with a GPU or several: docs/devices.md.

`

// defaults are the defaults of flags that no value shows.
var defaults = map[string]string{
	"model":        "a small model that is part of the program",
	"prompt":       "none",
	"prompts":      "none",
	"perplexity":   "none",
	"prompt-cache": "none",
	"stop":         "none",
	"seed":         "a random one, which -stats and -json tell",
}

// writeHelp lists the flags with their defaults.
func writeHelp(f *flag.FlagSet, w io.Writer) {
	fmt.Fprint(w, usage)
	f.VisitAll(func(f *flag.Flag) {
		value, text := flag.UnquoteUsage(f)
		standard, ok := defaults[f.Name]
		if !ok {
			standard = f.DefValue
		}
		if value != "" {
			value = " " + value
		}
		fmt.Fprintf(w, "  -%s%s\n    \t%s (default %s)\n", f.Name, value, text, standard)
	})
}
