// Leanbench measures LeanAttention and draws what its documentation shows.
//
//	leanbench COMMAND [flags]
//
// leanbench without a command lists them, and leanbench COMMAND -h the flags of
// one. Errors go to stderr: exit status 1, and 2 for wrong commands and flags.
package main

import (
	"os"
	"slices"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/cpu"
	"gorgonia.org/leanattention/cmd/leanbench/e2e"
	"gorgonia.org/leanattention/cmd/leanbench/figure"
	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/paper"
	"gorgonia.org/leanattention/cmd/leanbench/report"
)

var commands = slices.Concat(cpu.Commands, gpu.Commands, e2e.Commands, figure.Commands, paper.Commands, report.Commands)

func main() { os.Exit(command.Run(commands, os.Args[1:], os.Stdout, os.Stderr)) }
